#!/usr/bin/env bash
# Starts and ends a cluster over SSH, with the same installation of V-LoRA on every machine:
#   ./ssh.sh up   cluster.yaml 10.0.0.1 10.0.0.2 10.0.0.3     the first machine is the head's and the front end's
#   ./ssh.sh down cluster.yaml 10.0.0.1 10.0.0.2 10.0.0.3
# Logs are in the home directories: vlora-head.log, vlora-node.log, vlora-serve.log.
set -euo pipefail

VLORA=${VLORA:-/opt/vlora/bin/vlora}
TOKEN=${TOKEN:-/etc/vlora/cluster-token} # `token_file` of the plan
PORT=${PORT:-18870}                      # of `head` in the plan

usage() {
  sed -n '2,5s/^# //p' "$0"
  exit 2
}

[[ $# -ge 3 ]] || usage
action=$1 plan=$2 head=$3
shift 3

# Runs a command on a machine, detached from this connection.
start() {
  local host=$1 log=$2
  shift 2
  # shellcheck disable=SC2029  # expanded here on purpose
  ssh "$host" "setsid nohup $(printf '%q ' "$@") > $(printf '%q' "$log") 2>&1 < /dev/null &"
}

# Waits until a log has a line; fails with the log's end if an error comes first.
wait_for() {
  local host=$1 log=$2 line=$3
  for _ in $(seq 600); do
    # shellcheck disable=SC2029
    if ssh "$host" "grep -q $(printf '%q' "$line") $(printf '%q' "$log")"; then return; fi
    # shellcheck disable=SC2029
    if ssh "$host" "grep '^error: ' $(printf '%q' "$log")"; then exit 1; fi
    sleep "${PAUSE_S:-1}"
  done
  echo "$host: no '$line' in $log after 10 minutes" >&2
  exit 1
}

case $action in
  up)
    scp -q "$plan" "$head:cluster.yaml"
    start "$head" vlora-head.log "$VLORA" cluster up cluster.yaml
    wait_for "$head" vlora-head.log "other machines join"
    for host in "$@"; do
      # shellcheck disable=SC2029
      ssh "$head" "cat $(printf '%q' "$TOKEN")" | ssh "$host" "umask 077 && cat > vlora-cluster-token"
      start "$host" vlora-node.log "$VLORA" cluster join "$head:$PORT" --token-file vlora-cluster-token --host "$host"
      wait_for "$host" vlora-node.log "has joined"
    done
    start "$head" vlora-serve.log "$VLORA" serve --cluster cluster.yaml --http-port 8000
    wait_for "$head" vlora-serve.log "^ready: "
    echo "ready on $head; tunnel to it with: ssh -L 8000:127.0.0.1:8000 $head"
    ;;
  down)
    # The head's machine first: its front end ends before the nodes.
    for host in "$head" "$@"; do
      # shellcheck disable=SC2029
      ssh "$host" "$(printf '%q' "$VLORA") cluster down"
    done
    ;;
  *) usage ;;
esac
