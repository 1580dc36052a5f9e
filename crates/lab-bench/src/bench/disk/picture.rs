//! Captures the whole disk state of a QEMU, which must be the same before a move and after it.

use longhaul_lab::error::{During, LabError};
use longhaul_lab::peer::qmp::Qmp;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// A sorted list of lines, without numbers assigned by QEMU and without values that change by
/// themselves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Picture(Vec<String>);

impl Picture {
    /// Captures the QEMU of a process, whose control socket is free. Paths in its host's folder are
    /// shortened.
    pub(super) fn take(socket: &Path, pid: u32, folder: &Path) -> Result<Self, LabError> {
        let mut qmp = Qmp::connect(socket)?;
        let mut lines = open_files(pid).during(|| format!("look at process {pid}"))?;
        if lines.is_empty() {
            // An empty picture would be the same before and after.
            return Err(LabError::Answer {
                what: format!("process {pid}"),
                message: "it has no image open".to_owned(),
            });
        }
        lines.extend(edges(
            &qmp.execute("x-debug-query-block-graph", &json!({}))?,
        ));
        let nodes = qmp.execute("query-named-block-nodes", &json!({"flat": true}))?;
        for mut node in nodes.as_array().cloned().unwrap_or_default() {
            node["image"].take();
            lines.push(node.to_string());
        }
        let folder = folder.display().to_string();
        for line in &mut lines {
            *line = unnumbered(&line.replace(&folder, "HOST"));
        }
        lines.sort();
        Ok(Self(lines))
    }

    /// Returns the lines that are in only one of the two.
    pub(super) fn changes(&self, after: &Self) -> Vec<String> {
        let only = |these: &[String], those: &[String], mark: char| -> Vec<String> {
            let these = these.iter().filter(|line| !those.contains(line));
            these.map(|line| format!("{mark} {line}")).collect()
        };
        let mut changes = only(&self.0, &after.0, '-');
        changes.extend(only(&after.0, &self.0, '+'));
        changes
    }
}

/// Returns the edges between nodes, with their kind.
fn edges(graph: &Value) -> Vec<String> {
    let list = |key: &str| graph[key].as_array().cloned().unwrap_or_default();
    let nodes = list("nodes");
    let name = |id: &Value| {
        let node = nodes.iter().find(|node| node["id"] == *id);
        node.map_or(Value::Null, |node| node["name"].clone())
    };
    let mut edges = list("edges");
    for edge in &mut edges {
        for end in ["parent", "child"] {
            edge[end] = name(&edge[end]);
        }
    }
    edges.iter().map(Value::to_string).collect()
}

/// Nodes without a name get a random one.
fn unnumbered(line: &str) -> String {
    let mut parts = line.split("#block");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        out.push_str("#block");
        out.push_str(part.trim_start_matches(|letter: char| letter.is_ascii_digit()));
    }
    out
}

/// Returns the open images of a process, with their flags and locks.
fn open_files(pid: u32) -> std::io::Result<Vec<String>> {
    let mut lines = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?;
        // The file was closed meanwhile.
        let Ok(file) = fs::read_link(entry.path()) else {
            continue;
        };
        if file.extension().is_none_or(|end| end != "raw") {
            continue;
        }
        let fd = entry.file_name();
        let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{}", fd.display()))?;
        let flags = info.lines().filter(|line| line.starts_with("flags:"));
        // lock: NUMBER: OFDLCK ADVISORY READ -1 DEVICE:INODE FROM TO
        let locks = info.lines().filter(|line| line.starts_with("lock:"));
        let mut locks: Vec<String> = locks
            .map(|line| {
                let words: Vec<&str> = line.split_whitespace().collect();
                let bytes = words.len().saturating_sub(2);
                [
                    &words[2.min(words.len())..5.min(words.len())],
                    &words[bytes..],
                ]
                .concat()
                .join(" ")
            })
            .collect();
        locks.sort();
        let flags: Vec<&str> = flags.collect();
        lines.push(format!("{} {flags:?} {locks:?}", file.display()));
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edges_are_named_and_numbers_left_out() {
        let graph = json!({
            "nodes": [{"id": 7, "name": "disk-vda"}, {"id": 9, "name": "#block123"}],
            "edges": [{"parent": 7, "child": 9, "name": "file"}],
        });
        let [edge] = edges(&graph).try_into().unwrap();
        assert!(edge.contains("\"parent\":\"disk-vda\""), "{edge}");
        assert!(unnumbered(&edge).contains("\"child\":\"#block\""), "{edge}");
        let picture = |lines: &[&str]| Picture(lines.iter().map(|it| (*it).to_owned()).collect());
        let (before, after) = (picture(&["a", "b"]), picture(&["b", "c"]));
        assert_eq!(before.changes(&after), ["- a", "+ c"]);
        assert!(before.changes(&before).is_empty());
    }
}
