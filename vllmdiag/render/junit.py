"""`check` as a JUnit report: a test case for each layer and each expectation, as CI systems show them."""

from __future__ import annotations

from xml.etree.ElementTree import Element, SubElement, indent, tostring

from vllmdiag.model.check import CheckResult
from vllmdiag.model.diagnosis import LAYER_NAMES, Finding, LayerResult

from .page import clean


def junit_text(result: CheckResult) -> str:
    """Write a check as JUnit XML.

    A layer with a finding that counts is a failure, one that could not be observed is skipped (or an error, where
    ``--fail-on`` counts the unknown and nothing else is known), and so is one whose findings are set aside.
    """
    suites = Element("testsuites", name="vllmdiag")
    suite = SubElement(suites, "testsuite", name=f"vllm {result.profile}", timestamp=result.diagnosis.observed_at)
    for layer in result.diagnosis.layers:
        _layer(suite, result, layer)
    for expectation in result.expectations:
        case = SubElement(suite, "testcase", classname="vllm.expected", name=clean(expectation.name), time="0")
        if not expectation.met:
            message = f"expected {expectation.name} {expectation.wanted}, found {expectation.found}"
            SubElement(case, "failure", message=clean(message), type="expectation")
    verdict = SubElement(suite, "testcase", classname="vllm", name="verdict", time=f"{result.diagnosis.window_s:.3f}")
    if result.exit_code and result.status == "unknown":
        SubElement(verdict, "error", message=clean(result.summary), type="unknown")
    elif result.exit_code:
        SubElement(verdict, "failure", message=clean(result.summary), type=_cause(result))
    SubElement(verdict, "system-out").text = clean(result.summary)
    _count(suite, result.diagnosis.window_s)
    indent(suites)
    return tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _layer(suite: Element, result: CheckResult, layer: LayerResult) -> None:
    case = SubElement(
        suite, "testcase", classname="vllm.layer", name=f"{layer.layer} {LAYER_NAMES.get(layer.layer, '')}", time="0"
    )
    counted = [f for f in result.counted if f.layer == layer.layer]
    aside = [s for s in result.set_aside if s.layer == layer.layer]
    for finding in counted:
        failure = SubElement(case, "failure", message=clean(finding.summary), type=finding.cause)
        failure.text = _lines(finding)
    if not counted and aside:
        SubElement(case, "skipped", message=clean(f"{aside[0].cause}: {aside[0].why}"))
    elif not counted and layer.status == "unknown":
        SubElement(case, "skipped", message=clean(layer.summary))


def _lines(finding: Finding) -> str:
    facts = [*finding.evidence, *(f"next: {step.command} ({step.why})" for step in finding.next)]
    return "\n".join(clean(fact) for fact in facts)


def _cause(result: CheckResult) -> str:
    return result.counted[0].cause if result.counted else result.status


def _count(suite: Element, time_s: float) -> None:
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(sum(case.find(tag) is not None for case in cases)))
    suite.set("time", f"{time_s:.3f}")
