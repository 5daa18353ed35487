from tests.support.sites import authority, make_site, patience, site

__all__ = ["authority", "make_site", "patience", "site"]
