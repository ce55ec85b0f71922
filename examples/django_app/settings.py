"""The least that Django needs. Nothing here is about the engine."""

import os

SECRET_KEY = os.environ.get("DJANGO_SECRET_KEY", "an example's key, not a secret")
ALLOWED_HOSTS = ["localhost", "127.0.0.1"]
ROOT_URLCONF = "examples.django_app.urls"
MIDDLEWARE = ["django.middleware.common.CommonMiddleware"]
