"""A network over HTTP, with a page to try it: `vitrail serve`. Needs the extra `serve`.

request -> protocol (slow senders) -> guard (host, origin, token, headers) -> app (routes)
        -> bodies, uploads (limits, in memory) -> threads that decode -> line (bounded) -> one worker, in batches
"""
