# vitrail's server on a CPU: docker build -t vitrail . && docker run --rm -p 8000:8000 -e VITRAIL_TOKEN=... vitrail
# The image contains the bundled model; nothing is downloaded at run time. See docs/serving.md.

FROM python:3.12-slim AS build
ARG TORCH_INDEX=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
WORKDIR /build
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src ./src
# Installed into its own folder, so that neither pip's leftovers nor the sources end up in the final image. Set TORCH_INDEX
# to an index with CPU builds of torch if you can: the default builds include about a gigabyte of CUDA libraries.
RUN python -m venv /opt/vitrail \
    && /opt/vitrail/bin/pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} \
        -c constraints.txt torch torchvision \
    && /opt/vitrail/bin/pip install --no-cache-dir -c constraints.txt ".[serve]"

FROM python:3.12-slim
LABEL org.opencontainers.image.title="vitrail" \
      org.opencontainers.image.description="A Vision Transformer over HTTP" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin vitrail
COPY --from=build /opt/vitrail /opt/vitrail
# Write nothing at run time: no bytecode, no cache. Two malloc arenas are enough for the few decoding threads.
ENV PATH="/opt/vitrail/bin:$PATH" \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1 \
    VITRAIL_OFFLINE=1 \
    MALLOC_ARENA_MAX=2
WORKDIR /models
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2).close()"]
ENTRYPOINT ["vitrail", "serve", "--host", "0.0.0.0", "--port", "8000", "--device", "cpu"]
