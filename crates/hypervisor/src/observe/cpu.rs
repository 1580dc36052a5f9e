//! Reads a guest's vCPUs: their number, and the properties that the guest sees.
//!
//! There are some 500 properties, and QEMU answers one query each. They do not change while it
//! runs, so they are cached.

use super::{at_once, list, not_understood, property};
use crate::process::ProcessId;
use crate::qmp::{Qmp, QmpError};
use futures_util::FutureExt;
use longhaul_protocol::limits::CPU_PROPERTIES_MAX;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Mutex, PoisonError};

type Properties = BTreeMap<String, String>;

/// CPU properties that the guest sees and that are not feature bits.
const CPU_VALUES: [&str; 10] = [
    "family",
    "guest-phys-bits",
    "level",
    "level-func7",
    "model",
    "model-id",
    "phys-bits",
    "stepping",
    "vendor",
    "xlevel",
];
/// Switches visible to the guest that QEMU does not count among the features.
const CPU_SWITCHES: [&str; 7] = [
    "cpuid-0xb",
    "kvm",
    "l3-cache",
    "legacy-cache",
    "pmu",
    "tcg-cpuid",
    "vmware-cpuid-freq",
];
/// Features that follow from the number of vCPUs, and that only newer QEMUs list as features.
const CPU_DERIVED: [&str; 2] = ["cmp-legacy", "ht"];
/// The maximum number of processes whose CPUs are cached; the least recently used is evicted first.
const REMEMBERED_MAX: usize = 256;

static REMEMBERED: Mutex<VecDeque<Remembered>> = Mutex::new(VecDeque::new());

/// The first vCPU of a process, which does not change.
struct Remembered {
    process: ProcessId,
    path: String,
    properties: Properties,
}

fn known(process: &ProcessId, path: &str) -> Option<Properties> {
    let mut remembered = REMEMBERED.lock().unwrap_or_else(PoisonError::into_inner);
    let is_it = |one: &Remembered| one.process == *process && one.path == path;
    let at = remembered.iter().position(is_it)?;
    let found = remembered.remove(at)?;
    let properties = found.properties.clone();
    remembered.push_back(found);
    Some(properties)
}

fn remember(process: &ProcessId, path: &str, properties: &Properties) {
    let mut remembered = REMEMBERED.lock().unwrap_or_else(PoisonError::into_inner);
    remembered.retain(|one| one.process != *process);
    if remembered.len() >= REMEMBERED_MAX {
        remembered.pop_front();
    }
    remembered.push_back(Remembered {
        process: process.clone(),
        path: path.to_owned(),
        properties: properties.clone(),
    });
}

/// Returns the number of vCPUs, and the properties of the first of them.
pub(super) async fn cpus(
    qmp: &Qmp,
    process: Option<&ProcessId>,
) -> Result<(usize, Properties), QmpError> {
    let cpus = qmp.ask("query-cpus-fast", json!({})).await?;
    let cpus = list(&cpus, "query-cpus-fast")?;
    let first = cpus.first().and_then(|cpu| cpu["qom-path"].as_str());
    let first = first.ok_or_else(|| not_understood("query-cpus-fast", "it names no vCPU"))?;
    if let Some(properties) = process.and_then(|process| known(process, first)) {
        return Ok((cpus.len(), properties));
    }
    let properties = ask_properties(qmp, first).await?;
    if let Some(process) = process {
        remember(process, first, &properties);
    }
    Ok((cpus.len(), properties))
}

async fn ask_properties(qmp: &Qmp, path: &str) -> Result<Properties, QmpError> {
    // Expanding the empty model lists every feature bit by its one name that is not an alias.
    let model = json!({"type": "static", "model": {"name": "base"}});
    let (expanded, known) = tokio::try_join!(
        qmp.ask("query-cpu-model-expansion", model),
        qmp.ask("qom-list", json!({"path": path})),
    )?;
    let features = expanded["model"]["props"].as_object();
    let features = features
        .ok_or_else(|| not_understood("query-cpu-model-expansion", "it lists no properties"))?;
    let known = list(&known, "qom-list")?;
    let names: BTreeSet<&str> = known
        .iter()
        .filter_map(|property| property["name"].as_str())
        .filter(|name| {
            let feature = features.contains_key(*name) && !CPU_DERIVED.contains(name);
            let enlightenment = name.starts_with("hv-") && *name != "hv-passthrough";
            feature || enlightenment || CPU_VALUES.contains(name) || CPU_SWITCHES.contains(name)
        })
        .collect();
    if names.len() > CPU_PROPERTIES_MAX {
        let why = format!("a CPU has more than {CPU_PROPERTIES_MAX} properties");
        return Err(not_understood("qom-list", &why));
    }
    let questions = names.into_iter().map(|name| {
        let ask = async move { Ok((name, property(qmp, path, name).await?)) };
        ask.boxed()
    });
    let answers: Vec<(&str, Option<Value>)> = at_once(questions.collect()).await?;
    let shown = |(name, value): (&str, Option<Value>)| Some((name.to_owned(), shown(&value?)));
    Ok(answers.into_iter().filter_map(shown).collect())
}

fn shown(value: &Value) -> String {
    match value {
        Value::Bool(true) => "on".to_owned(),
        Value::Bool(false) => "off".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_asked_for_longest_ago_is_forgotten() {
        let process = |pid: usize| ProcessId {
            pid: pid as i32,
            start_ticks: 1,
            boot_id: "this".to_owned(),
        };
        let properties = |of: usize| Properties::from([("level".to_owned(), of.to_string())]);
        for pid in 0..REMEMBERED_MAX {
            remember(&process(pid), "/cpu", &properties(pid));
        }
        assert_eq!(known(&process(0), "/cpu"), Some(properties(0)));
        assert_eq!(known(&process(0), "/other"), None);
        let other = ProcessId {
            start_ticks: 2,
            ..process(0)
        };
        assert_eq!(known(&other, "/cpu"), None);
        remember(&other, "/cpu", &properties(9));
        assert_eq!(known(&process(0), "/cpu"), Some(properties(0)));
        assert_eq!(known(&process(1), "/cpu"), None);
    }
}
