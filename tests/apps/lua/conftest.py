from tests.apps.lua.cluster_site import site
from tests.apps.lua.lua_hub import lua

__all__ = ["lua", "site"]
