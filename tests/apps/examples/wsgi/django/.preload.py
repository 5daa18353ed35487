"""A Django application under /django/shop/: its modules are those of the process, so the folder is on `sys.path`."""

import os
import sys

from smqrt.app import dir, io

sys.path.insert(0, io.realpath(""))
os.environ["DJANGO_SETTINGS_MODULE"] = "site_of_test.settings"

from django.core.management import call_command
from site_of_test.wsgi import application

call_command("migrate", verbosity=0)
dir.mount(application, "shop")
