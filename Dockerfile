# The image of every process of the platform, that of Spark's executors, and a small one of workers without Spark, from one
# set of packages:
#
#   docker build --target platform --tag ghcr.io/noetl/noetl-dagster:0.1.0 .
#   docker build --target spark --tag ghcr.io/noetl/noetl-dagster-spark:0.1.0 .
#   docker build --target worker --tag ghcr.io/noetl/noetl-dagster-worker:0.1.0 .
#
# Without further arguments what is installed has Debian's newest corrections; what the base has stays as it is: name a
# newer one for those. For the same image every time name the base image by its digest and the day of Debian's archive,
# and let the builder set all times:
#
#   docker buildx build --build-arg BASE=docker.io/library/debian:trixie-20251117-slim@sha256:... \
#     --build-arg SNAPSHOT=20251118T000000Z --build-arg SOURCE_DATE_EPOCH=1763424000 \
#     --output type=image,rewrite-timestamp=true ...

ARG BASE=docker.io/library/debian:trixie-20251117-slim
ARG SNAPSHOT=
ARG SOURCE_DATE_EPOCH=1763424000


FROM ${BASE} AS base

ARG SNAPSHOT
ARG DEBIAN_FRONTEND=noninteractive

SHELL ["/bin/bash", "-o", "errexit", "-o", "pipefail", "-c"]

ENV LANG=C.UTF-8 \
    PATH=/opt/noetl/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

RUN if [ -n "${SNAPSHOT}" ]; then \
        rm -f /etc/apt/sources.list.d/*; \
        for suite in debian/trixie debian/trixie-updates debian-security/trixie-security; do \
            echo "deb [check-valid-until=no] http://snapshot.debian.org/archive/${suite%/*}/${SNAPSHOT} ${suite#*/} main"; \
        done > /etc/apt/sources.list; \
    fi


# The virtual environment, at the place where it will be used. Nothing else of this stage goes into an image.
FROM base AS build

ARG SOURCE_DATE_EPOCH

# hadolint ignore=DL3008  # SNAPSHOT pins them all
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /build

COPY requirements-build.lock ./
RUN python3 -m venv /opt/build \
    && /opt/build/bin/python -m pip install --no-cache-dir --no-compile --require-hashes \
        --requirement requirements-build.lock

# uv refuses what has no hash, of packages and of what builds them
ENV UV_LINK_MODE=copy \
    UV_NO_CACHE=true \
    UV_NO_MANAGED_PYTHON=true

COPY requirements-image.lock ./
RUN python3 -m venv --without-pip /opt/noetl/.venv \
    && /opt/build/bin/uv pip sync --python /opt/noetl/.venv/bin/python --require-hashes \
        --build-constraints requirements-build.lock --require-build-hashes requirements-image.lock

COPY pyproject.toml README.md ./
COPY schema ./schema
COPY playbooks ./playbooks
COPY examples ./examples
COPY noetl_dagster ./noetl_dagster
# uv leaves a note of when it read the wheel, and lists it
RUN /opt/build/bin/uv build --wheel --out-dir dist --build-constraints requirements-build.lock --require-build-hashes \
    && /opt/build/bin/uv pip install --python /opt/noetl/.venv/bin/python --no-deps --no-index --find-links dist \
        noetl-dagster \
    && rm /opt/noetl/.venv/lib/python3.*/site-packages/noetl_dagster-*.dist-info/uv_cache.json \
    && sed -i '/uv_cache.json/d' /opt/noetl/.venv/lib/python3.*/site-packages/noetl_dagster-*.dist-info/RECORD

# The root file system will be read-only, so everything is compiled now. Compiled files that hold the time of their source
# would be stale as soon as a builder rewrites times; these are taken as they are.
RUN PYTHONHASHSEED=0 /opt/noetl/.venv/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/noetl/.venv/lib


# The same without Spark and its jars
FROM build AS slim

RUN /opt/build/bin/uv pip uninstall --python /opt/noetl/.venv/bin/python dagster-pyspark py4j pyspark


FROM base AS runtime

ARG SOURCE_DATE_EPOCH

# Folders that are written to are of group 0, which users that a cluster makes up have.
# hadolint ignore=DL3008  # SNAPSHOT pins them all
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates libnss-wrapper python3 tini \
    && groupadd --gid 10001 noetl \
    && useradd --uid 10001 --gid 10001 --no-log-init --no-create-home --home-dir /var/lib/noetl --shell /usr/sbin/nologin noetl \
    && install --directory --owner=10001 --group=0 --mode=0775 /var/lib/noetl /opt/noetl/dagster \
    && rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/*

COPY playbooks /opt/noetl/playbooks

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/var/lib/noetl \
    NOETL_HOME=/var/lib/noetl \
    NOETL_PLAYBOOKS_PATH=/opt/noetl/playbooks \
    NOETL_EMBEDDED=false \
    NOETL_LOG_FORMAT=json \
    DAGSTER_HOME=/opt/noetl/dagster

WORKDIR /opt/noetl

ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.source="https://github.com/noetl/noetl-dagster" \
      org.opencontainers.image.documentation="https://github.com/noetl/noetl-dagster/blob/main/docs/how-to/kubernetes.md" \
      org.opencontainers.image.vendor="NoETL" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"


FROM runtime AS java

ARG SOURCE_DATE_EPOCH

# Java's package makes links among the pages of man, which slim images have no folders for
# hadolint ignore=DL3008  # SNAPSHOT pins them all
RUN mkdir -p /usr/share/man/man1 \
    && apt-get update \
    && apt-get install --yes --no-install-recommends openjdk-21-jre-headless \
    && ln -s "/usr/lib/jvm/java-21-openjdk-$(dpkg --print-architecture)" /opt/java \
    && rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/*

COPY --from=build /opt/noetl/.venv /opt/noetl/.venv

ENV JAVA_HOME=/opt/java \
    PYSPARK_PYTHON=/opt/noetl/.venv/bin/python


# What Spark on Kubernetes starts as executors, with the same Python and the same package as the driver; and a server of
# Spark Connect.
FROM java AS spark

ENV SPARK_HOME=/opt/spark

# of pyspark's own folders; the driver mounts its configuration at /opt/spark/conf
RUN pyspark="$(python -c 'import importlib.util as u; print(u.find_spec("pyspark").submodule_search_locations[0])')" \
    && install --directory /opt/spark/conf \
    && install --directory --owner=10001 --group=0 --mode=0775 /opt/spark/work-dir \
    && for part in bin sbin jars python; do ln -s "${pyspark}/${part}" "/opt/spark/${part}"; done

COPY scripts/spark-entrypoint /opt/entrypoint.sh

LABEL org.opencontainers.image.title="noetl-dagster-spark" \
      org.opencontainers.image.description="Spark executors and Spark Connect for NoETL playbooks on Dagster"

WORKDIR /opt/spark/work-dir
USER 10001:10001
# the driver of executors watches them
HEALTHCHECK NONE
ENTRYPOINT ["/opt/entrypoint.sh"]
CMD ["connect"]


FROM runtime AS worker

COPY --from=slim /opt/noetl/.venv /opt/noetl/.venv

LABEL org.opencontainers.image.title="noetl-dagster-worker" \
      org.opencontainers.image.description="Pool workers for NoETL playbooks on Dagster, without Spark"

USER 10001:10001
HEALTHCHECK NONE
ENTRYPOINT ["/usr/bin/tini", "--"]
CMD ["noetl-dagster", "worker"]


FROM java AS platform

LABEL org.opencontainers.image.title="noetl-dagster" \
      org.opencontainers.image.description="NoETL playbooks as Dagster assets: webserver, daemon, code location, HTTP API, workers"

USER 10001:10001
EXPOSE 3000 4000 8700
# probes ask over HTTP: /health and /ready of serve, and of NOETL_HEALTH_PORT
HEALTHCHECK NONE
ENTRYPOINT ["/usr/bin/tini", "--"]
CMD ["noetl-dagster", "serve"]
