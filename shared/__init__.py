"""Contracts between the services: values, messages, keys, scripts. Imports no service."""
