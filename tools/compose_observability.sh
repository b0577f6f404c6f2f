# Part of compose_test.sh: the profile `observability` of docker-compose.yml. Prometheus finds every process by the
# names of the containers, reads it, and has our rules; Grafana has its data source and our dashboard.
# Where no registry answers, this machine's `prometheus` runs in the image of Prometheus' place. Of
# Grafana there is nothing then but what it would be given: a stand-in shows the files that it has.
# shellcheck shell=bash disable=SC2154

readonly prometheus_port=${PROMETHEUS_PORT:-19190} grafana_port=${GRAFANA_PORT:-13190}
readonly stand_in=localhost/splitserve-stand-in
has_grafana=''

# image_of VARIABLE: what the Compose file takes without it
image_of() { grep -oE "\\$\\{$1:-[^}]+" docker-compose.yml | cut -d- -f2-; }
pull() { timeout 120 podman pull --quiet "docker.io/$1" >/dev/null 2>&1; }

choose_images() {
    local context=$scratch/stand-ins
    PROMETHEUS_IMAGE=$(image_of PROMETHEUS_IMAGE) GRAFANA_IMAGE=$(image_of GRAFANA_IMAGE)
    mkdir -p "$context"
    if ! pull "$PROMETHEUS_IMAGE"; then
        need prometheus 'Debian: apt-get install prometheus'
        command -v prometheus >/dev/null || fail 'no image of Prometheus, and no prometheus here'
        cp "$(command -v prometheus)" "$context/prometheus"
        PROMETHEUS_IMAGE=$stand_in-prometheus
        podman build --quiet --tag "$PROMETHEUS_IMAGE" --file - "$context" >/dev/null <<END
FROM $BASE_IMAGE
COPY prometheus /bin/prometheus
ENTRYPOINT ["/bin/prometheus", "--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
END
    fi
    if pull "$GRAFANA_IMAGE"; then
        has_grafana=1
    else
        GRAFANA_IMAGE=$stand_in-grafana
        podman build --quiet --tag "$GRAFANA_IMAGE" --file - "$context" >/dev/null <<END
FROM $BASE_IMAGE
ENTRYPOINT ["python3", "-m", "http.server", "3000", "--directory", "/etc"]
END
    fi
    export PROMETHEUS_IMAGE GRAFANA_IMAGE
    export PROMETHEUS_PORT=127.0.0.1:$prometheus_port GRAFANA_PORT=127.0.0.1:$grafana_port
    say "Prometheus: $PROMETHEUS_IMAGE; Grafana: $GRAFANA_IMAGE"
}

prometheus_says() { # EXPRESSION VALUE
    curl --silent --fail --get "localhost:$prometheus_port/api/v1/query" --data-urlencode "query=$1" |
        python3 -c 'import json, sys
result = json.load(sys.stdin)["data"]["result"]
print(result)
sys.exit(not result or float(result[0]["value"][1]) != float(sys.argv[1]))' "$2"
}

has_all_rules() {
    local rules
    rules=$(grep -c 'alert:' deploy/observability/alerts.yml)
    curl --silent --fail "localhost:$prometheus_port/api/v1/rules" | python3 -c 'import json, sys
rules = json.load(sys.stdin)["data"]["groups"][0]["rules"]
print([rule["health"] for rule in rules])
sys.exit([rule["health"] for rule in rules] != ["ok"] * int(sys.argv[1]))' "$rules"
}

grafana_has() { curl --silent --fail "localhost:$grafana_port/$1"; } # PATH

check_observability() {
    choose_images
    SPLITSERVE_METRICS_LISTEN=0.0.0.0:9100 compose_args='--profile observability' up --scale executor=2
    wait_for 600 'splitserve info shows 2 connected executors' has_executors 2
    wait_for 600 'the gateway is ready' curl --silent --fail "localhost:$http_port/health/ready"
    wait_for 300 'Prometheus reads all four processes' prometheus_says 'sum(up)' 4
    ask_gateway '{"prompt": "Once", "max_tokens": 8, "ignore_eos": true}' >"$scratch/http" || fail 'curl'
    wait_for 300 'the dashboard would show 8 tokens' \
        prometheus_says 'sum(splitserve_output_tokens_total)' 8
    wait_for 300 'all alerts are evaluated' has_all_rules
    if [ -n "$has_grafana" ]; then
        wait_for 300 'Grafana has the dashboard' grafana_has api/dashboards/uid/splitserve
        wait_for 300 'Grafana asks Prometheus' \
            grafana_has 'api/datasources/proxy/uid/prometheus/api/v1/query?query=up'
    else
        local file
        for file in grafana/provisioning/datasources/prometheus.yml \
            grafana/provisioning/dashboards/splitserve.yml splitserve/dashboards/splitserve.json; do
            wait_for 300 "Grafana would find $file" grafana_has "$file"
        done
    fi
    compose --profile observability down --volumes --remove-orphans >"$scratch/down.log" 2>&1 || true
}
