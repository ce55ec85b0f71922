"""A Django project with a Qwen3 engine inside: `uvicorn examples.django_app.asgi:app`."""
