"""Clients as sites of an NVFlare federation.

`engine` is the driver's end, which runs the algorithm; `parties` are the server's and the sites' ends, which
NVFlare starts; `relay` and `desk` are what the server does. Only `parties` imports NVFlare.
"""
