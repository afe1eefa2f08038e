"""Pages and documents about the gateway: /, /docs, /openapi.json, /version.

openapi.py    the HTTP API as an OpenAPI document, with the models that parse the bodies
routes.py     the routes; the pages are in static/ and load nothing from other sites
"""
