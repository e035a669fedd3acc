"""`vitrail serve`: a model over HTTP."""

import importlib.util
import logging
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vitrail.checkpoint.known_weights import DEFAULT_WEIGHTS
from vitrail.cli.inputs import rename_predictor
from vitrail.cli.options.grammar import pass_options
from vitrail.cli.options.use import TOKEN, ServeOptions
from vitrail.cli.progress import reading
from vitrail.core.console import format_millions
from vitrail.core.errors import ConfigError
from vitrail.core.text import format_size, pluralise
from vitrail.predict.predictor import predictor
from vitrail.serve.served_model import ServedModel
from vitrail.serve.settings import ServeSettings, allowed_hosts


def run_serve(options: ServeOptions) -> int:
    missing = [name for name in ("starlette", "uvicorn", "python_multipart") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"serving needs {' and '.join(missing)}, not installed here: pip install 'vitrail[serve]'")
    from vitrail.serve.server import bind_socket, is_loopback, run_server
    from vitrail.serve.service import Service, service_threads

    listener = bind_socket(options.host, options.port)
    try:
        local = is_loopback(listener)
        # An empty token is a mistake, not a choice.
        token = os.environ.get(TOKEN) if options.token is None else options.token
        served = load_served(options, local, token)
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="vitrail: %(message)s")
        if not local and token is None:
            warning = f"anyone who can reach {options.host} can use this server; set a token: --token or ${TOKEN}"
            print(f"vitrail: warning: {warning}", file=sys.stderr)
        status = run_server(Service(served, served.settings), listener, lambda: announce(served, listener))
    finally:
        listener.close()
    if service_threads():  # a thread that hangs in a decoder or a kernel would keep the process from exiting
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def load_served(options: ServeOptions, local: bool, token: str | None) -> ServedModel:
    """Loads the network on its device, with the requested settings."""
    if options.threads is not None and options.threads < 1:
        raise ConfigError(f"--threads {options.threads} must be at least 1")
    # One core is left for HTTP and decoding: a network that uses all cores is faster alone, but slower under load.
    torch.set_num_threads(options.threads or max(min(torch.get_num_threads(), (os.cpu_count() or 1) - 1), 1))
    origins = tuple(origin.rstrip("/") for origin in options.origin)
    settings = pass_options(
        options,
        ServeSettings,
        token=token,
        origins=origins,
        hosts=allowed_hosts(options.host, loopback=local, origins=origins),
        batch=16 if options.batch is None else options.batch,
        timeout_s=options.timeout,
        read_s=options.read_timeout,
        drain_s=options.timeout,
        decoders=max(2, min(4, os.cpu_count() or 2)),
        connections=max_connections(),
    )
    weights = options.weights or DEFAULT_WEIGHTS
    with reading(weights):
        found = predictor(
            weights,
            device=options.device,
            image_size=options.image_size,
            patch=options.patch,
            precision=options.precision,
        )
        found = rename_predictor(found, options.labels, options.rename)
    if options.batch is None and found.device.type == "cuda":
        settings = replace(settings, batch=64)
    return ServedModel(found, Path(weights).name or weights, settings)


def max_connections() -> int:
    """How many connections to accept, with some file descriptors to spare: without any, a server could not even
    reject a connection."""
    try:
        import resource
    except ImportError:  # absent on Windows
        return 512
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 512 if soft == resource.RLIM_INFINITY else max(min(512, soft - 64), 16)


def announce(served: ServedModel, listener: socket.socket) -> None:
    """Prints the server's address, its model and its limits."""
    from vitrail.serve.server import browser_address

    about: dict[str, Any] = served.describe()
    limits, place = about["limits"], about["device"]
    place += f", {pluralise(torch.get_num_threads(), 'thread')}" if place == "cpu" else ""
    size = f"{format_size(served.predictor.preprocessing.image)} px"
    parameters = f"{format_millions(about['parameters'])} parameters"
    print(f"{browser_address(listener)}  (Ctrl-C stops it)")
    print(f"model: {about['name']}: {about['network']}, {parameters}, {size}, {about['outputs']}, on {place}")
    request = f"{limits['max_bytes'] / 2**20:g} MiB and {limits['max_images']} images per request"
    queue = f"{limits['max_pixels'] / 1e6:g} million pixels each, {limits['queue']} queued, {limits['batch']} per batch"
    token = "token required" if served.settings.token else "no token"
    print(f"limits: {request}, {queue}, {limits['timeout_s']:g} s; {token}", flush=True)
