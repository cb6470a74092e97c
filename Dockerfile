FROM python:3.11.13-slim-bookworm AS build
WORKDIR /src
COPY requirements.txt ./
RUN python -m venv /opt/tidegate \
 && /opt/tidegate/bin/pip install --no-cache-dir --require-hashes -r requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY protocol protocol
COPY tiers tiers
COPY proxy proxy
COPY pipeline pipeline
RUN /opt/tidegate/bin/pip install --no-cache-dir --no-deps --no-build-isolation .

FROM python:3.11.13-slim-bookworm
COPY --from=build /opt/tidegate /opt/tidegate
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/tidegate tidegate
ENV PATH=/opt/tidegate/bin:$PATH
USER tidegate
WORKDIR /var/lib/tidegate
VOLUME /var/lib/tidegate
ENTRYPOINT ["tidegate"]
CMD ["serve", "--config", "/etc/tidegate/tidegate.toml"]
