"""Queries to the libraries of device drivers."""
