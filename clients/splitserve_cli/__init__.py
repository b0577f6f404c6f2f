"""Command `splitserve`: serves, queries, inspects.

A thin layer over the client and the services.
"""
