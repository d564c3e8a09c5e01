# An image with the command `halation`: docker build -t halation .
# The GPU build of torch needs only the driver of the host: docker run --gpus all -v "$PWD:/work" halation doctor
FROM python:3.12-slim

WORKDIR /opt/halation
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir -c constraints.txt '.[train,web,ray,fast,video]'

WORKDIR /work
ENTRYPOINT ["halation"]
CMD ["--help"]
