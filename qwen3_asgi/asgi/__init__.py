"""Bytes in, bytes out: the routes of the mounted app, as pure ASGI.

HTTP status codes and headers live here and nowhere below.
"""
