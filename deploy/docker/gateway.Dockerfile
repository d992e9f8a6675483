# The gateway: no torch, no model. Build from the repository's root:
#   docker build -f deploy/docker/gateway.Dockerfile -t prefixfleet-gateway .
FROM python:3.11-slim
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1
WORKDIR /app
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY configs configs
COPY kvindex kvindex
COPY engine engine
COPY worker worker
COPY router router
COPY sim sim
RUN pip install -c constraints.txt ".[ui,sim]" && useradd --uid 10001 --create-home prefixfleet
USER 10001
WORKDIR /home/prefixfleet
EXPOSE 8000 8001
ENTRYPOINT ["prefixfleet", "gateway", "-c", "/etc/prefixfleet/fleet.yaml"]
CMD ["--host", "0.0.0.0"]
