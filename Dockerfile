# Nestling on CPUs:   docker build -t nestling .
# A source of smaller CPU-only builds of torch:   --build-arg TORCH_ARGS="--index-url URL"
#
# Agent code runs in a jail inside the container, and a jail needs user namespaces, which the default
# seccomp profile of Docker refuses:
#   docker run --rm -it --security-opt seccomp=unconfined --security-opt apparmor=unconfined \
#       -v "$PWD/runs:/home/nestling/runs" nestling run recipes/quick.toml
# Where the host forbids unprivileged user namespaces: --user root --cap-add SYS_ADMIN as well.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim-bookworm

RUN apt-get update \
 && apt-get install -y --no-install-recommends bubblewrap \
 && rm -rf /var/lib/apt/lists/*

ARG TORCH=2.13.0
ARG TORCH_ARGS=""
WORKDIR /opt/nestling
COPY constraints.txt ./
RUN pip install --no-cache-dir --no-deps torch==${TORCH} ${TORCH_ARGS} \
 && pip install --no-cache-dir --no-deps --require-hashes -r constraints.txt

COPY pyproject.toml README.md LICENSE ./
COPY src ./src
COPY recipes ./recipes
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

RUN useradd --create-home nestling
USER nestling
WORKDIR /home/nestling
RUN ln -s /opt/nestling/recipes recipes && mkdir runs
ENV OMP_NUM_THREADS=1
ENTRYPOINT ["nestling"]
CMD ["doctor"]
