"""`vitrail serve`: a model over HTTP."""

import importlib.util
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.cli.inputs import rename_predictor
from vitrail.cli.options.use import TOKEN, ServeOptions
from vitrail.core.console import format_millions
from vitrail.core.errors import ConfigError
from vitrail.core.text import format_size

if TYPE_CHECKING:
    import socket

    from vitrail.serve.served_model import ServedModel
    from vitrail.serve.settings import ServeSettings


def run_serve(options: ServeOptions) -> int:
    check_installed()
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
            print(
                f"vitrail: warning: anybody who reaches {options.host} can use this server; give it a token: --token "
                f"or ${TOKEN}",
                file=sys.stderr,
            )
        status = run_server(Service(served, served.settings), listener, lambda: announce(served, listener))
    finally:
        listener.close()
    if service_threads():  # one that hangs in a decoder or a kernel would keep the process from ending
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def check_installed() -> None:
    missing = [name for name in ("starlette", "uvicorn", "python_multipart") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"serving needs {' and '.join(missing)}, not installed here: pip install 'vitrail[serve]'")


def load_served(options: ServeOptions, local: bool, token: str | None) -> "ServedModel":
    """The network on its device, and the settings that were asked for."""
    import torch

    from vitrail.checkpoint.known_weights import DEFAULT_WEIGHTS
    from vitrail.cli.progress import reading
    from vitrail.predict.predictor import predictor
    from vitrail.serve.served_model import ServedModel
    from vitrail.serve.settings import allowed_hosts

    weights = options.weights or DEFAULT_WEIGHTS
    torch.set_num_threads(choose_threads(options.threads, torch.get_num_threads()))
    origins = tuple(origin.rstrip("/") for origin in options.origin)
    known = make_settings(
        options,
        token,
        origins,
        allowed_hosts(options.host, loopback=local, origins=origins),
        16 if options.batch is None else options.batch,
    )
    with reading(weights):
        found = predictor(weights, device=options.device, image_size=options.image_size)
        found = rename_predictor(found, options.labels, options.rename)
    if options.batch is None and found.device.type == "cuda":
        known = make_settings(options, token, origins, known.hosts, 64)
    return ServedModel(found, Path(weights).name or weights, known)


def choose_threads(asked: int | None, usual: int) -> int:
    """A core is left for HTTP and decoding: a network that has them all is quicker alone, and slower among requests."""
    if asked is None:
        return max(min(usual, (os.cpu_count() or 1) - 1), 1)
    if asked < 1:
        raise ConfigError(f"--threads {asked} must be at least 1")
    return asked


def make_settings(
    options: ServeOptions, token: str | None, origins: tuple[str, ...], hosts: tuple[str, ...], batch: int
) -> "ServeSettings":
    from vitrail.serve.settings import ServeSettings

    return ServeSettings(
        token=token,
        origins=origins,
        hosts=hosts,
        queue=options.queue,
        batch=batch,
        wait_ms=options.wait_ms,
        timeout_s=options.timeout,
        max_bytes=options.max_bytes,
        max_pixels=options.max_pixels,
        read_s=options.read_timeout,
        drain_s=options.timeout,
        decoders=max(2, min(4, os.cpu_count() or 2)),
        connections=max_connections(),
        access_log=options.access_log,
    )


def max_connections() -> int:
    """As many as leave some descriptors over: a server without any could not even refuse."""
    try:
        import resource
    except ImportError:  # not everywhere
        return 512
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 512 if soft == resource.RLIM_INFINITY else max(min(512, soft - 64), 16)


def announce(served: "ServedModel", listener: "socket.socket") -> None:
    """Where it is, what it is and what it takes."""
    import torch

    from vitrail.serve.server import browser_address

    about: dict[str, Any] = served.describe()
    limits = about["limits"]
    threads = torch.get_num_threads()
    place = (
        f"{about['device']}, {threads} thread{'s' if threads > 1 else ''}"
        if about["device"] == "cpu"
        else about["device"]
    )
    print(f"{browser_address(listener)}  (Ctrl-C stops it)")
    print(
        f"model: {about['name']}: {about['network']}, {format_millions(about['parameters'])} parameters, "
        f"{format_size(served.predictor.preprocessing.image)} px, {about['outputs']}, on {place}"
    )
    print(
        f"limits: {limits['max_bytes'] / 2**20:g} MiB and {limits['max_images']} images a request, "
        f"{limits['max_pixels'] / 1e6:g} million pixels each, {limits['queue']} waiting, {limits['batch']} a batch, "
        f"{limits['timeout_s']:g} s; {'token asked for' if served.settings.token else 'no token'}",
        flush=True,
    )
