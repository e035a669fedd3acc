"""Serves a model over HTTP, with a page to try it: `vitrail serve`. Needs the extra `serve`.

request -> server (timeouts) -> middleware (host, origin, token, headers) -> app (routes)
        -> requests (size limits, in memory) -> decoding threads -> batch queue (bounded) -> model thread, in batches
"""
