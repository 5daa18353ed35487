"""The pages of the site."""

from django import forms
from django.http import FileResponse, JsonResponse, StreamingHttpResponse
from django.middleware.csrf import get_token
from django.urls import path, reverse

from site_of_test import settings


class Order(forms.Form):
    """A form with a file."""

    number = forms.IntegerField(min_value=1)
    photo = forms.FileField()


def index(request):
    request.session["visits"] = request.session.get("visits", 0) + 1
    told = {"visits": request.session["visits"], "token": get_token(request), "url": reverse("order")}
    return JsonResponse(told | {"user": str(request.user)})


def order(request):
    form = Order(request.POST, request.FILES)
    if not form.is_valid():
        return JsonResponse(form.errors, status=400)
    photo = form.cleaned_data["photo"]
    return JsonResponse({"number": form.cleaned_data["number"], "photo": [photo.name, photo.size]})


def rows(request):
    return StreamingHttpResponse((f"{number}\n" for number in range(5)), content_type="text/csv")


def source(request):
    return FileResponse(open(settings.__file__, "rb"))


def fails(request):
    raise ValueError("what Django answers itself")


urlpatterns = [
    path("", index),
    path("order/", order, name="order"),
    path("rows/", rows),
    path("source/", source),
    path("fails/", fails),
]
