# A small image of vllmdiag: built from this directory, nothing in it but Python, the package and what it needs.
#
#   docker build -t vllmdiag .
#   docker run --rm --pid container:vllm --network container:vllm --user 0 \
#     --cap-drop ALL --cap-add SYS_PTRACE --cap-add DAC_READ_SEARCH vllmdiag diagnose
#
# What each option is for, and what is not seen without it: docs/containers.md.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
WORKDIR /source
RUN python -m venv /opt/vllmdiag
COPY pyproject.toml README.md LICENSE ./
COPY docs/man docs/man
COPY playbooks playbooks
COPY vllmdiag vllmdiag
RUN /opt/vllmdiag/bin/pip install --no-cache-dir .

FROM python:${PYTHON}-slim
COPY --from=build /opt/vllmdiag /opt/vllmdiag
ENV PATH=/opt/vllmdiag/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1
# Nobody by default: it lists processes and asks the HTTP port. To look inside, run it as the user of vLLM or as root.
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["vllmdiag"]
CMD ["--help"]
