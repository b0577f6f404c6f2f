# splitserve: three images from one file.
#
#   docker build --target scheduler -t splitserve-scheduler .
#   docker build --target executor  -t splitserve-executor .
#   docker build --target gateway   -t splitserve-gateway .
#
# Where pip finds packages is its own business: pass PIP_INDEX_URL, PIP_EXTRA_INDEX_URL,
# PIP_FIND_LINKS, PIP_NO_INDEX or PIP_CERT as build arguments if its defaults do not do.
ARG BASE_IMAGE=python:3.11-slim

# --- the wheel -----------------------------------------------------------------------------------
FROM ${BASE_IMAGE} AS build
LABEL org.opencontainers.image.title=splitserve
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_NO_INDEX PIP_CERT
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/build
WORKDIR /src
COPY . .
RUN /opt/build/bin/pip wheel --quiet --no-deps --wheel-dir /dist .

# --- the CPU kernels, for every instruction set; the build fails where one cannot be compiled -----
FROM ${BASE_IMAGE} AS kernels
LABEL org.opencontainers.image.title=splitserve
RUN command -v g++ >/dev/null \
    || { apt-get update -qq && apt-get install -qq -y --no-install-recommends g++; }
COPY kernels/splitserve_kernels /src/splitserve_kernels
RUN install -d /kernels && cd /src && python3 -m splitserve_kernels.cpu.build /kernels

# --- what all images share; PIP_CONSTRAINT: the versions of packages that CI tests with ------------
FROM ${BASE_IMAGE} AS runtime
LABEL org.opencontainers.image.title=splitserve \
      org.opencontainers.image.licenses=Apache-2.0
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1 PATH=/opt/splitserve/bin:$PATH \
    GRPC_EXPERIMENTS=-event_engine_client,-event_engine_listener \
    PIP_CONSTRAINT=/opt/constraints.txt
COPY constraints.txt /opt/
RUN python3 -m venv /opt/splitserve \
    && useradd --uid 10001 --create-home --shell /usr/sbin/nologin splitserve \
    && install -d -o splitserve -g splitserve /models \
    && install -d -o splitserve -g splitserve -m 700 /etc/splitserve /etc/splitserve/scheduler \
        /etc/splitserve/executor /etc/splitserve/gateway /etc/splitserve/operator
WORKDIR /home/splitserve
STOPSIGNAL SIGTERM
ENTRYPOINT ["splitserve"]

# --- scheduler: no torch, no transformers; it can make certificates (docker-compose.tls.yml) -------
FROM runtime AS scheduler
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_NO_INDEX PIP_CERT
COPY --from=build /dist /dist
RUN pip install --quiet "$(echo /dist/*.whl)[security,otel]"
USER splitserve
ENV SPLITSERVE_LISTEN=0.0.0.0:50051 SPLITSERVE_CLUSTER_LISTEN=0.0.0.0:50050
EXPOSE 50051
# Alive, not ready: a scheduler that waits for its first executor is not to be restarted for it.
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s \
    CMD ["python", "-m", "splitserve_rpc.healthcheck", "--alive", "--name", "scheduler.splitserve.internal"]
CMD ["scheduler"]

# --- gateway: HTTP ------------------------------------------------------------------------------
FROM runtime AS gateway
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_NO_INDEX PIP_CERT
COPY --from=build /dist /dist
RUN pip install --quiet "$(echo /dist/*.whl)[gateway,otel]"
USER splitserve
ENV SPLITSERVE_HTTP=0.0.0.0:8000
# The second for the live page, where SPLITSERVE_LIVE_LISTEN says so.
EXPOSE 8000 8001
# Alive, not ready, as above.
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s \
    CMD ["python", "-m", "splitserve_gateway.healthcheck"]
CMD ["gateway"]

# --- executor: torch, transformers, the bundled model, and what Triton compiles with ---------------
FROM runtime AS executor
# On a GPU Triton compiles a C module for each kernel when it is first used: that takes a C compiler
# and the headers of Python. Images of python.org's Python have the headers; Debian's own have not.
RUN has_headers() { test -e "$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h"; } \
    && { command -v gcc >/dev/null && has_headers; } \
    || { apt-get update -qq && apt-get install -qq -y --no-install-recommends gcc libc6-dev \
        && { has_headers || apt-get install -qq -y --no-install-recommends python3-dev; } \
        && rm -rf /var/lib/apt/lists/*; }
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_NO_INDEX PIP_CERT
# Which torch build: for a GPU, one that fits its driver; "torch==2.13.0+cpu" for none.
ARG TORCH=torch==2.13.0
RUN pip install --quiet "${TORCH}"
COPY --from=build /dist /dist
RUN pip install --quiet "$(echo /dist/*.whl)[executor]"
COPY --from=kernels /kernels /opt/splitserve/kernels
USER splitserve
# Models that are downloaded, and which models passed their trials, are kept under /models; mount a
# volume there.
ENV SPLITSERVE_LISTEN=0.0.0.0:50052 HF_HOME=/models SPLITSERVE_KERNEL_CACHE=/opt/splitserve/kernels \
    SPLITSERVE_TRIAL_CACHE=/models/trials
# Compiles and imports a module, and looks for the CPU kernels: an image without either is not built.
RUN python -m splitserve_kernels.toolchain
EXPOSE 50052
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
    CMD ["python", "-m", "splitserve_rpc.healthcheck", "--alive", "--name", "executor.splitserve.internal"]
CMD ["executor"]
