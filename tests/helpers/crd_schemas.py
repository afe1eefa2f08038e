"""Shapes of the custom resources in deploy/, written from their documentation, because the projects' schemas
are not available offline. They have the fields that deploy/ uses and refuse all others, such as misspelt
ones. They do not check whether a controller accepts the values."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string", "minLength": 1}
INTEGER: Schema = {"type": "integer", "minimum": 0}
STRINGS: Schema = {"type": "array", "items": STRING, "minItems": 1}
STRING_MAP: Schema = {"type": "object", "additionalProperties": STRING}
DURATION: Schema = {"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}


def obj(required: str = "", **fields: Schema) -> Schema:
    return {
        "type": "object",
        "properties": fields,
        "required": required.split(),
        "additionalProperties": False,
    }


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def enum(*values: str) -> Schema:
    return {"enum": list(values)}


_ISSUER_REF = obj("name kind", name=STRING, kind=enum("Issuer", "ClusterIssuer"), group=STRING)
_PRIVATE_KEY = obj(
    algorithm=enum("RSA", "ECDSA", "Ed25519"),
    size=INTEGER,
    encoding=enum("PKCS1", "PKCS8"),
    rotationPolicy=enum("Never", "Always"),
)
_SELECTOR = obj(
    matchLabels=STRING_MAP,
    matchExpressions=array(obj("key operator", key=STRING, operator=STRING, values=STRINGS)),
)
_PARENTS = array(obj("name", name=STRING, namespace=STRING, sectionName=STRING))
_BACKENDS = array(obj("name", name=STRING, port=INTEGER, group=STRING, kind=STRING, weight=INTEGER))
_HPA_SCALING = obj(
    stabilizationWindowSeconds=INTEGER,
    policies=array(
        obj("type value periodSeconds", type=enum("Pods", "Percent"), value=INTEGER, periodSeconds=INTEGER)
    ),
)
_RULE = obj(
    "expr",
    alert=STRING,
    record=STRING,
    expr=STRING,
    labels=STRING_MAP,
    annotations=STRING_MAP,
    **{"for": DURATION, "keep_firing_for": DURATION},
)

#: Schemas of `spec`, by apiVersion and kind.
SPECS: dict[tuple[str, str], Schema] = {
    ("cert-manager.io/v1", "Issuer"): obj(selfSigned=obj(), ca=obj("secretName", secretName=STRING)),
    ("cert-manager.io/v1", "Certificate"): obj(
        "secretName issuerRef",
        secretName=STRING,
        issuerRef=_ISSUER_REF,
        isCA={"type": "boolean"},
        commonName=STRING,
        dnsNames=STRINGS,
        uris=STRINGS,
        usages=STRINGS,
        duration=DURATION,
        renewBefore=DURATION,
        privateKey=_PRIVATE_KEY,
    ),
    ("monitoring.coreos.com/v1", "PodMonitor"): obj(
        "selector podMetricsEndpoints",
        selector=_SELECTOR,
        jobLabel=STRING,
        podMetricsEndpoints=array(obj(port=STRING, path=STRING, interval=DURATION)),
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): obj(
        "groups", groups=array(obj("name rules", name=STRING, interval=DURATION, rules=array(_RULE)))
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): obj(
        "scaleTargetRef triggers",
        scaleTargetRef=obj("name", apiVersion=STRING, kind=STRING, name=STRING),
        pollingInterval=INTEGER,
        cooldownPeriod=INTEGER,
        minReplicaCount=INTEGER,
        maxReplicaCount=INTEGER,
        fallback=obj(
            "failureThreshold replicas",
            failureThreshold=INTEGER,
            replicas=INTEGER,
            behavior=enum("static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"),
        ),
        advanced=obj(
            horizontalPodAutoscalerConfig=obj(behavior=obj(scaleDown=_HPA_SCALING, scaleUp=_HPA_SCALING))
        ),
        triggers=array(
            obj(
                "type metadata",
                type=enum("prometheus"),
                metricType=enum("AverageValue", "Value"),
                metadata=obj(
                    "serverAddress query threshold",
                    serverAddress=STRING,
                    query=STRING,
                    threshold={"type": "string", "pattern": r"^[0-9.]+$"},
                    activationThreshold=STRING,
                ),
            )
        ),
    ),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): obj(
        "parentRefs rules",
        parentRefs=_PARENTS,
        hostnames=STRINGS,
        rules=array(
            obj(
                matches=array(
                    obj(path=obj("type value", type=enum("PathPrefix", "Exact"), value=STRING), method=STRING)
                ),
                timeouts=obj(request=DURATION, backendRequest=DURATION),
                backendRefs=_BACKENDS,
            )
        ),
    ),
    ("gateway.networking.k8s.io/v1", "GRPCRoute"): obj(
        "parentRefs rules",
        parentRefs=_PARENTS,
        hostnames=STRINGS,
        rules=array(
            obj(
                matches=array(
                    obj(method=obj(service=STRING, method=STRING, type=enum("Exact", "RegularExpression")))
                ),
                backendRefs=_BACKENDS,
            )
        ),
    ),
    ("inference.networking.k8s.io/v1", "InferencePool"): obj(
        "selector targetPorts endpointPickerRef",
        selector=obj("matchLabels", matchLabels=STRING_MAP),
        targetPorts=array(obj("number", number=INTEGER)),
        endpointPickerRef=obj(
            "name",
            name=STRING,
            port=obj("number", number=INTEGER),
            failureMode=enum("FailOpen", "FailClose"),
        ),
    ),
}
