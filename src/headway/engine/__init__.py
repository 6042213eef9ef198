"""Drives the core on a clock: the loop, the process around it, streams and text."""
