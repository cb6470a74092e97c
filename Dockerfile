# docker build --build-arg EXTRAS=arrow,pipeline --build-arg PACKAGES=openjdk-17-jre-headless -t tidegate-pipeline .
# EXTRAS: extras of pyproject.toml, joined by commas. Their packages are not pinned by hash. PACKAGES: packages of Debian.
FROM python:3.11.13-slim-bookworm AS build
ARG EXTRAS=""
WORKDIR /src
COPY requirements.txt ./
RUN python -m venv /opt/tidegate \
 && /opt/tidegate/bin/pip install --no-cache-dir --require-hashes -r requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY docs/runbook docs/runbook
COPY protocol protocol
COPY tiers tiers
COPY proxy proxy
COPY pipeline pipeline
COPY tidegate tidegate
RUN if [ -n "$EXTRAS" ]; then /opt/tidegate/bin/pip install --no-cache-dir --no-build-isolation ".[$EXTRAS]"; fi \
 && /opt/tidegate/bin/pip install --no-cache-dir --no-deps --no-build-isolation .

FROM python:3.11.13-slim-bookworm
ARG PACKAGES=""
RUN if [ -n "$PACKAGES" ]; then \
      apt-get update && apt-get install -y --no-install-recommends $PACKAGES && rm -rf /var/lib/apt/lists/*; fi
COPY --from=build /opt/tidegate /opt/tidegate
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/tidegate tidegate
ENV PATH=/opt/tidegate/bin:$PATH
USER tidegate
WORKDIR /var/lib/tidegate
VOLUME /var/lib/tidegate
ENTRYPOINT ["tidegate"]
CMD ["serve", "--config", "/etc/tidegate/tidegate.toml"]
