"""The WSGI application, as `django-admin startproject` writes it."""

from django.core.wsgi import get_wsgi_application

application = get_wsgi_application()
