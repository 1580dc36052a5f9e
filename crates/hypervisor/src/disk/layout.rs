//! Records the nodes below each of a guest's disk devices, and detects changes.
//!
//! Any client with a monitor can change the block graph during a move: a snapshot inserts an
//! overlay between the device and its image, a job inserts a filter or replaces the image, a medium
//! is changed. The guest's writes then go elsewhere, and QEMU does not always emit an event. So the
//! graph is recorded when a move begins, and compared until the guest is released.

use super::graph::{Graph, Known};
use super::nodes::DiskNodes;
use super::{Front, nodes::text};
use crate::qmp::{Qmp, QmpError};
use std::collections::BTreeMap;

/// The edges below each device that has a disk, or could have one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    devices: BTreeMap<String, Vec<String>>,
}

/// Why the block graph differs from the recorded one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("what the disk device {device} stands on has changed: it was {before}, and is {now}")]
pub struct LayoutChanged {
    /// The device, as QEMU's block graph names it.
    pub device: String,
    before: String,
    now: String,
}

impl Layout {
    /// Records the graph. An inserted disk export counts as the file that it replaces.
    pub async fn look(qmp: &Qmp, fronts: &[(DiskNodes, Front)]) -> Result<Self, QmpError> {
        let (graph, known) = tokio::try_join!(Graph::ask(qmp), Known::ask(qmp))?;
        Ok(Self::read(&graph, &known, fronts))
    }

    fn read(graph: &Graph, known: &Known, fronts: &[(DiskNodes, Front)]) -> Self {
        let devices = graph.devices();
        let below = |device: &str| {
            let mut lines = Vec::new();
            let root = graph.child(device, "root");
            let mut open: Vec<(&str, &str)> = root.map(|root| ("", &**root)).into_iter().collect();
            while let Some((role, node)) = open.pop() {
                let is = |(nodes, front): &&(DiskNodes, Front)| nodes.standing(front) == node;
                let front = fronts.iter().find(is);
                let children = match front {
                    Some(_) => Vec::new(),
                    None => graph.children(node),
                };
                let (name, file) = match front {
                    Some((nodes, _)) => {
                        let file = text(&nodes.file, "filename").map(str::to_owned);
                        (&*nodes.file_name, file)
                    }
                    None if children.is_empty() => (node, known.file(node)),
                    // A format node's name for its file changes with the node below.
                    None => (node, None),
                };
                let file = file.map(|file| format!(" ({file})")).unwrap_or_default();
                let role = if role.is_empty() {
                    role.to_owned()
                } else {
                    format!("{role} ")
                };
                lines.push(format!("{role}{name}{file}"));
                open.extend(children);
            }
            lines
        };
        Self {
            devices: devices
                .into_iter()
                .map(|device| (device.to_owned(), below(device)))
                .collect(),
        }
    }

    /// Compares with a later state.
    pub fn compare(&self, later: &Self) -> Result<(), LayoutChanged> {
        let devices = self.devices.keys().chain(later.devices.keys());
        let changed = devices
            .into_iter()
            .find(|device| self.devices.get(*device) != later.devices.get(*device));
        let Some(device) = changed else { return Ok(()) };
        Err(LayoutChanged {
            device: device.clone(),
            before: shown(self.devices.get(device)),
            now: shown(later.devices.get(device)),
        })
    }
}

fn shown(lines: Option<&Vec<String>>) -> String {
    match lines {
        None => "not there".to_owned(),
        Some(lines) if lines.is_empty() => "without a medium".to_owned(),
        Some(lines) => format!("`{}`", lines.join(", ")),
    }
}
