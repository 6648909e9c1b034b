"""Runs one stack on this machine: nginx, gateways, broker and worker pools under one process."""
