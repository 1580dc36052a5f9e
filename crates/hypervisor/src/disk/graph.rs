//! Queries QEMU's block nodes and their graph.

use super::drives::Drives;
use crate::qmp::{COMMAND_TIMEOUT, Qmp, QmpError};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The drivers of filters that may be above a disk's format node.
pub(super) const FILTERS: [&str; 2] = ["copy-on-read", "throttle"];
/// The drivers of filters that a job puts on the node that it works on.
const JOBS: [&str; 5] = [
    "backup-top",
    "commit_top",
    "copy-before-write",
    "mirror_top",
    "stream",
];

/// Returns whether a driver is that of a filter that a job puts on the node that it works on.
pub(crate) fn is_of_job(driver: &str) -> bool {
    JOBS.contains(&driver)
}

/// QEMU's answer about its named nodes.
pub(super) struct Known(Value);

impl Known {
    const COMMAND: &str = "query-named-block-nodes";

    #[cfg(test)]
    pub(super) fn of(answer: Value) -> Self {
        Self(answer)
    }

    pub(super) async fn ask(qmp: &Qmp) -> Result<Self, QmpError> {
        let flat = json!({"flat": true});
        let known = qmp.execute(Self::COMMAND, flat, COMMAND_TIMEOUT);
        known.await.map(Self)
    }

    fn value<T>(&self, name: &str, read: impl Fn(&Value) -> Option<T>) -> Option<T> {
        let mut nodes = self.0.as_array()?.iter();
        read(nodes.find(|node| node["node-name"] == name)?)
    }

    pub(super) fn size_bytes(&self, name: &str) -> Result<u64, QmpError> {
        let size = self.value(name, |node| node["image"]["virtual-size"].as_u64());
        size.ok_or_else(|| QmpError::Answer {
            command: Self::COMMAND.to_owned(),
            why: format!("it does not say how large the node {name} is"),
        })
    }

    /// Returns the format node below a disk's filters: limits on its requests, copy on read, jobs.
    pub(super) fn below_filters<'a>(&self, graph: &'a Graph, top: &'a str) -> &'a str {
        let mut node = top;
        loop {
            let driver = self.driver(node).unwrap_or_default();
            let below = match &*driver {
                filter if FILTERS.contains(&filter) => graph.child(node, "file"),
                job if is_of_job(job) => graph.child(node, "backing").or(graph.child(node, "file")),
                _ => None,
            };
            match below {
                Some(below) => node = below,
                None => return node,
            }
        }
    }

    /// Returns one entry of what QEMU reports about a node.
    pub(super) fn entry(&self, name: &str, key: &str) -> Option<Value> {
        self.value(name, |node| node.get(key).cloned())
    }

    /// Returns whether a node's image is encrypted.
    pub(super) fn is_encrypted(&self, name: &str) -> bool {
        let encrypted =
            |node: &Value| Some(node["encrypted"] == true || node["image"]["encrypted"] == true);
        self.value(name, encrypted).unwrap_or(false)
    }

    /// Returns what a node does with zeros that the guest writes: `off`, `on` or `unmap`.
    pub(super) fn detects_zeros(&self, name: &str) -> Option<String> {
        self.value(name, |node| {
            node["detect_zeroes"].as_str().map(str::to_owned)
        })
    }

    /// Returns the driver of a node.
    pub(super) fn driver(&self, name: &str) -> Option<String> {
        self.value(name, |node| node["drv"].as_str().map(str::to_owned))
    }

    /// Returns the object of a node: for a file's node, the file's path.
    pub(super) fn file(&self, name: &str) -> Option<String> {
        self.value(name, |node| node["file"].as_str().map(str::to_owned))
    }

    /// Returns the nodes whose image names a backing file that contains this text.
    pub(super) fn backed_by(&self, part: &str) -> Vec<&str> {
        let nodes = self.0.as_array().into_iter().flatten();
        let named = nodes.filter(|node| {
            let file = node["image"]["backing-filename"].as_str();
            file.is_some_and(|file| file.contains(part))
        });
        named
            .filter_map(|node| node["node-name"].as_str())
            .collect()
    }

    /// QEMU 7.2 does not report this.
    pub(super) fn is_active(&self, name: &str) -> Option<bool> {
        self.value(name, |node| node["active"].as_bool())
    }
}

/// QEMU's block graph: which node uses which.
///
/// A device is in it by the id of its drive, if it has one, otherwise by its own id, and by its
/// path in QEMU's object tree only if it has neither. It can be asked for by its path, always.
pub(super) struct Graph {
    names: Vec<String>,
    /// Names of the users of nodes: devices, and others with a disk of their own.
    backends: Vec<String>,
    /// What the graph calls each device, by its path.
    devices: BTreeMap<String, String>,
    edges: Vec<Edge>,
}

struct Edge {
    parent: String,
    name: String,
    child: String,
}

impl Graph {
    pub(super) async fn ask(qmp: &Qmp) -> Result<Self, QmpError> {
        let command = "x-debug-query-block-graph";
        let (graph, drives) = tokio::try_join!(qmp.query(command), Drives::ask(qmp))?;
        Self::read(&graph, &drives).ok_or_else(|| QmpError::Answer {
            command: command.to_owned(),
            why: "it shows no nodes and edges".to_owned(),
        })
    }

    pub(super) fn read(graph: &Value, drives: &Drives) -> Option<Self> {
        let nodes = graph["nodes"].as_array()?;
        let name = |id: &Value| {
            let node = nodes.iter().find(|node| node["id"] == *id)?;
            node["name"].as_str().map(str::to_owned)
        };
        let edge = |edge: &Value| {
            Some(Edge {
                parent: name(&edge["parent"])?,
                name: edge["name"].as_str()?.to_owned(),
                child: name(&edge["child"])?,
            })
        };
        let backends = nodes
            .iter()
            .filter(|node| node["type"] == "block-backend")
            .filter_map(|node| node["name"].as_str().map(str::to_owned));
        Some(Self {
            backends: backends.filter(|name| !name.is_empty()).collect(),
            devices: drives.in_graph(),
            names: nodes.iter().filter_map(|node| name(&node["id"])).collect(),
            edges: graph["edges"].as_array()?.iter().filter_map(edge).collect(),
        })
    }

    pub(super) fn has(&self, node: &str) -> bool {
        self.names.iter().any(|name| name == node)
    }

    /// Returns the node that a device has, by the device's path.
    pub(super) fn root(&self, device: &str) -> Option<&String> {
        let in_graph = self.devices.get(device).map_or(device, String::as_str);
        self.child(in_graph, "root")
    }

    /// Returns the node that another node has as its `file`, `backing`.
    pub(super) fn child(&self, parent: &str, name: &str) -> Option<&String> {
        let mut edges = self.edges.iter();
        let edge = edges.find(|edge| edge.parent == parent && edge.name == name);
        edge.map(|edge| &edge.child)
    }

    /// Returns the devices, and other named users of nodes.
    pub(super) fn devices(&self) -> Vec<&str> {
        self.backends.iter().map(String::as_str).collect()
    }

    /// Returns the children of a node, each with the name of its edge, sorted by these names.
    pub(super) fn children(&self, parent: &str) -> Vec<(&str, &str)> {
        // A device may have the name of a node.
        let edges = self.edges.iter();
        let edges = edges.filter(|edge| edge.parent == parent && edge.name != "root");
        let mut children: Vec<_> = edges.map(|edge| (&*edge.name, &*edge.child)).collect();
        children.sort_unstable();
        children
    }

    /// Returns the parents of a node.
    pub(super) fn parents(&self, child: &str) -> Vec<&str> {
        let edges = self.edges.iter().filter(|edge| edge.child == child);
        edges.map(|edge| &*edge.parent).collect()
    }
}
