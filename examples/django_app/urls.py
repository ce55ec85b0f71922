from django.urls import path

from examples.django_app import views

urlpatterns = [
    path("ask", views.ask),
    path("ask-sync", views.ask_in_a_thread),
    path("story", views.story),
]
