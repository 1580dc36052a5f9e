//! Queries QEMU's block nodes and their graph.

use crate::qmp::{COMMAND_TIMEOUT, Qmp, QmpError};
use serde_json::{Value, json};

/// QEMU's answer about its named nodes.
pub(super) struct Known(Value);

impl Known {
    const COMMAND: &str = "query-named-block-nodes";

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

/// QEMU's block graph: which node uses which. Devices are in it by their paths.
pub(super) struct Graph {
    names: Vec<String>,
    /// Names of the users of nodes: devices, and others with a disk of their own.
    backends: Vec<String>,
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
        let graph = qmp.query(command).await?;
        Self::read(&graph).ok_or_else(|| QmpError::Answer {
            command: command.to_owned(),
            why: "it shows no nodes and edges".to_owned(),
        })
    }

    fn read(graph: &Value) -> Option<Self> {
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
            names: nodes.iter().filter_map(|node| name(&node["id"])).collect(),
            edges: graph["edges"].as_array()?.iter().filter_map(edge).collect(),
        })
    }

    pub(super) fn has(&self, node: &str) -> bool {
        self.names.iter().any(|name| name == node)
    }

    /// Returns the node that another node, or a device, has as its `file`, `backing`, `root`.
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
        let edges = self.edges.iter().filter(|edge| edge.parent == parent);
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
