//! What stands below a guest's disk in its QEMU: an NBD node is put beneath the disk's format node
//! while the guest runs, and taken out again.
//!
//! Both are one reopening of the format node: QEMU lets its requests end, exchanges what is below,
//! and goes on. Both may be asked for again when it is not known whether they were done.

use crate::qmp::{COMMAND_TIMEOUT, Qmp, QmpError};
use serde_json::{Map, Value, json};
use std::path::PathBuf;
use std::time::Duration;

/// Time for QEMU to let the disk's requests end and to exchange what is below.
const REOPEN_TIMEOUT: Duration = Duration::from_secs(60);
/// How long QEMU tries to reach a front end that is gone, before its guest sees errors. While it
/// tries, requests wait.
const RECONNECT_SECONDS: u64 = 3600;
/// Options of a file's node that mean the same for the node that stands in for it.
const KEPT: [&str; 4] = ["cache", "detect-zeroes", "discard", "read-only"];

/// The nodes of a disk, each with the options that it was made with.
#[derive(Debug, Clone)]
pub struct DiskNodes {
    format: Map<String, Value>,
    file: Map<String, Value>,
    format_name: String,
    file_name: String,
}

/// Why nodes are not such that something can be put between them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("this disk cannot be moved while it is in use: {0}")]
pub struct NodesError(String);

impl DiskNodes {
    /// A format node and the node of its file, by the whole of their options, as `blockdev-add`
    /// takes them: QEMU gives options that are left out at a reopening their defaults.
    pub fn new(format: Map<String, Value>, file: Map<String, Value>) -> Result<Self, NodesError> {
        let refuse = |why: &str| Err(NodesError(why.to_owned()));
        let text = |options: &Map<String, Value>, key: &str| {
            let value = options.get(key).and_then(Value::as_str);
            value.map(str::to_owned)
        };
        let (Some(format_name), Some(file_name)) =
            (text(&format, "node-name"), text(&file, "node-name"))
        else {
            return refuse("its nodes have no names");
        };
        if text(&format, "file").as_ref() != Some(&file_name) {
            return refuse("its format node does not name the node of its file");
        }
        match text(&format, "driver").as_deref() {
            Some("raw") => {}
            // A file's node remembers how long the file is. Where the file has grown beneath the
            // front end, QEMU reads zeros behind the old end when it has its node back.
            Some("qcow2") => return refuse("its image grows, and QEMU would not see that"),
            _ => return refuse("its format is not raw"),
        }
        Ok(Self {
            format,
            file,
            format_name,
            file_name,
        })
    }

    fn above(&self, below: &str) -> Value {
        let mut options = self.format.clone();
        options.insert("file".to_owned(), below.into());
        json!({"options": [options]})
    }

    fn other_below(&self, expected: &str, found: Option<&String>) -> OtherBelow {
        OtherBelow {
            format: self.format_name.clone(),
            expected: expected.to_owned(),
            found: found.cloned(),
        }
    }
}

/// A disk as a front end shows it.
#[derive(Debug, Clone)]
pub struct Front {
    /// What QEMU is to call its node: a name that is used once.
    pub node: String,
    /// The socket of the front end.
    pub socket: PathBuf,
    /// The name of the export.
    pub export: String,
}

/// Something else stands below a disk than was thought.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the disk {format} stands on {} and not on {expected}: somebody else changes this guest's \
     disks; nothing was changed", found.as_deref().unwrap_or("nothing")
)]
pub struct OtherBelow {
    /// The format node.
    format: String,
    /// What should be below.
    expected: String,
    /// What is.
    found: Option<String>,
}

/// Why a front end is not below a disk.
#[derive(Debug, Clone, thiserror::Error)]
pub enum InsertError {
    /// Something else stands below the disk than was thought.
    #[error(transparent)]
    Other(#[from] OtherBelow),
    /// The front end shows less than the file has. QEMU would take it, and the guest's disk would
    /// shrink.
    #[error(
        "the agent shows {shown_bytes} bytes of a disk that has {file_bytes}: its image has grown \
         since it was looked at; the disk is used as before"
    )]
    Smaller {
        /// By the front end.
        shown_bytes: u64,
        /// By the file.
        file_bytes: u64,
    },
    /// It could not be done; the guest goes on as before.
    #[error("{0}; the disk is used as before")]
    Refused(QmpError),
    /// Whether it was done is not known.
    #[error("{0}; it is not known which way the disk is used now: try again, or take it out")]
    InDoubt(QmpError),
}

/// Why a front end is still below a disk, or may be.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RemoveError {
    /// Something else stands below the disk than was thought.
    #[error(transparent)]
    Other(#[from] OtherBelow),
    /// It could not be done; the front end must go on.
    #[error(
        "{0}; the disk is still used through the agent, which must go on; does somebody hold a \
         lock on its image?"
    )]
    Refused(QmpError),
    /// Whether it was done is not known; the front end must go on until it is.
    #[error("{0}; it is not known which way the disk is used now: try again")]
    InDoubt(QmpError),
}

/// Puts a front end below a disk. It must answer already.
pub async fn insert(qmp: &Qmp, nodes: &DiskNodes, front: &Front) -> Result<(), InsertError> {
    let graph = Graph::ask(qmp).await.map_err(InsertError::Refused)?;
    let found = graph.below(&nodes.format_name);
    if found == Some(&front.node) {
        return Ok(());
    }
    if found != Some(&nodes.file_name) {
        return Err(nodes.other_below(&nodes.file_name, found).into());
    }
    if !graph.has(&front.node) {
        // QEMU connects before it answers.
        qmp.execute("blockdev-add", front_options(nodes, front), COMMAND_TIMEOUT)
            .await
            .map_err(InsertError::Refused)?;
    }
    let exchanged = exchange(qmp, nodes, front).await;
    if exchanged.is_err() && !matches!(exchanged, Err(InsertError::InDoubt(_))) {
        // Where it cannot be deleted either, it is in nobody's way; the first error says more.
        let _ = delete(qmp, &front.node).await;
    }
    exchanged
}

/// Gives the disk the front end's node, which is there, for its file's.
async fn exchange(qmp: &Qmp, nodes: &DiskNodes, front: &Front) -> Result<(), InsertError> {
    let known = Known::ask(qmp).await.map_err(InsertError::Refused)?;
    let size = |name: &str| {
        let size = known.value(name, |node| node["image"]["virtual-size"].as_u64());
        size.ok_or_else(|| InsertError::Refused(Known::unclear()))
    };
    let (shown_bytes, file_bytes) = (size(&front.node)?, size(&nodes.file_name)?);
    if shown_bytes < file_bytes {
        return Err(InsertError::Smaller {
            shown_bytes,
            file_bytes,
        });
    }
    let reopened = reopen(qmp, nodes.above(&front.node)).await;
    reopened.map_err(|error| match is_refusal(&error) {
        true => InsertError::Refused(error),
        false => InsertError::InDoubt(error),
    })
}

/// Takes a front end out from below a disk, whose QEMU then has the file again, and its locks: ours
/// must have been given back. The front end must answer until this has returned.
pub async fn remove(qmp: &Qmp, nodes: &DiskNodes, front: &Front) -> Result<(), RemoveError> {
    let graph = Graph::ask(qmp).await.map_err(RemoveError::InDoubt)?;
    let found = graph.below(&nodes.format_name);
    if found == Some(&front.node) {
        activate(qmp, nodes).await.map_err(RemoveError::Refused)?;
        let reopened = reopen(qmp, nodes.above(&nodes.file_name)).await;
        reopened.map_err(|error| match is_refusal(&error) {
            true => RemoveError::Refused(error),
            false => RemoveError::InDoubt(error),
        })?;
    } else if found != Some(&nodes.file_name) {
        return Err(nodes.other_below(&front.node, found).into());
    }
    if graph.has(&front.node) {
        let deleted = delete(qmp, &front.node).await;
        deleted.map_err(RemoveError::InDoubt)?;
    }
    Ok(())
}

fn front_options(nodes: &DiskNodes, front: &Front) -> Value {
    let mut options = json!({
        "driver": "nbd", "node-name": front.node, "export": front.export,
        "server": {"type": "unix", "path": front.socket.to_string_lossy()},
        "reconnect-delay": RECONNECT_SECONDS,
    });
    for key in KEPT {
        if let Some(value) = nodes.file.get(key) {
            options[key] = value.clone();
        }
    }
    options
}

async fn reopen(qmp: &Qmp, options: Value) -> Result<(), QmpError> {
    let reopened = qmp.execute("blockdev-reopen", options, REOPEN_TIMEOUT);
    reopened.await.map(|_| ())
}

async fn delete(qmp: &Qmp, node: &str) -> Result<(), QmpError> {
    let deleted = qmp.execute("blockdev-del", json!({"node-name": node}), COMMAND_TIMEOUT);
    deleted.await.map(|_| ())
}

/// After a migration QEMU 10.0 leaves a file's node inactive that was not below its disk when the
/// guest began to run.
async fn activate(qmp: &Qmp, nodes: &DiskNodes) -> Result<(), QmpError> {
    let known = Known::ask(qmp).await?;
    let active = |name: &str| known.value(name, |node| node["active"].as_bool());
    if active(&nodes.format_name) == Some(true) && active(&nodes.file_name) == Some(false) {
        let file = json!({"node-name": nodes.file_name, "active": true});
        let activated = qmp.execute("blockdev-set-active", file, COMMAND_TIMEOUT);
        activated.await?;
    }
    Ok(())
}

/// Whether QEMU said no, so that nothing was done.
fn is_refusal(error: &QmpError) -> bool {
    matches!(error, QmpError::Refused { .. })
}

/// What QEMU tells of its nodes, one by one.
struct Known(Value);

impl Known {
    const COMMAND: &str = "query-named-block-nodes";

    async fn ask(qmp: &Qmp) -> Result<Self, QmpError> {
        let flat = json!({"flat": true});
        let known = qmp.execute(Self::COMMAND, flat, COMMAND_TIMEOUT);
        known.await.map(Self)
    }

    fn value<T>(&self, name: &str, read: impl Fn(&Value) -> Option<T>) -> Option<T> {
        let mut nodes = self.0.as_array()?.iter();
        read(nodes.find(|node| node["node-name"] == name)?)
    }

    fn unclear() -> QmpError {
        QmpError::Answer {
            command: Self::COMMAND.to_owned(),
            why: "it does not say how large the nodes are".to_owned(),
        }
    }
}

/// QEMU's block graph: which node stands on which.
struct Graph {
    names: Vec<String>,
    /// A node and its file.
    files: Vec<(String, String)>,
}

impl Graph {
    async fn ask(qmp: &Qmp) -> Result<Self, QmpError> {
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
        let edges = graph["edges"].as_array()?.iter();
        let files = edges.filter(|edge| edge["name"] == "file");
        Some(Self {
            names: nodes.iter().filter_map(|node| name(&node["id"])).collect(),
            files: files
                .filter_map(|edge| Some((name(&edge["parent"])?, name(&edge["child"])?)))
                .collect(),
        })
    }

    fn has(&self, node: &str) -> bool {
        self.names.iter().any(|name| name == node)
    }

    fn below(&self, node: &str) -> Option<&String> {
        let mut files = self.files.iter();
        files.find(|(above, _)| above == node).map(|(_, file)| file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(format: Value, file: Value) -> Result<DiskNodes, NodesError> {
        let object = |value: Value| value.as_object().unwrap().clone();
        DiskNodes::new(object(format), object(file))
    }

    #[test]
    fn nodes_that_could_not_be_put_back_as_they_were_are_refused() {
        let file = json!({"node-name": "f", "driver": "file", "discard": "unmap"});
        let raw = json!({"node-name": "d", "driver": "raw", "file": "f", "offset": 512});
        let kept = nodes(raw.clone(), file.clone()).unwrap();
        let back = kept.above("f");
        assert_eq!(back, json!({"options": [raw]}));
        for wrong in [
            json!({"driver": "raw", "file": "f"}),
            json!({"node-name": "d", "driver": "raw", "file": "other"}),
            json!({"node-name": "d", "driver": "raw", "file": {"driver": "file"}}),
            json!({"node-name": "d", "driver": "vmdk", "file": "f"}),
            json!({"node-name": "d", "driver": "qcow2", "file": "f", "backing": null}),
        ] {
            nodes(wrong.clone(), file.clone()).expect_err(&wrong.to_string());
        }
    }

    #[test]
    fn the_front_takes_the_options_of_the_file_that_it_stands_for() {
        let cache = json!({"direct": true, "no-flush": false});
        let file = json!({"node-name": "f", "driver": "file", "discard": "unmap", "cache": cache,
            "locking": "on", "filename": "/x"});
        let raw = json!({"node-name": "d", "driver": "raw", "file": "f"});
        let front = Front {
            node: "n".to_owned(),
            socket: "/run/s".into(),
            export: "e".to_owned(),
        };
        let expected = json!({"driver": "nbd", "node-name": "n", "export": "e",
            "server": {"type": "unix", "path": "/run/s"}, "reconnect-delay": 3600,
            "discard": "unmap", "cache": cache});
        assert_eq!(front_options(&nodes(raw, file).unwrap(), &front), expected);
    }
}
