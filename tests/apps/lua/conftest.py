from tests.apps.lua.cluster_site import site
from tests.apps.lua.lua_hub import lua
from tests.apps.lua.mqtt_languages import half, run
from tests.clients.mqtt.mosquitto import secure

__all__ = ["half", "lua", "run", "secure", "site"]
