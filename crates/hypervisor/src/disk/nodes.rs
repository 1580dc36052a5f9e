//! Describes the nodes of a guest's disk, and which can be restored as they were.

use super::Front;
use super::graph::Graph;
use super::held::Held;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Options of a file's node that also apply to the node that replaces it.
const KEPT: [&str; 4] = ["cache", "detect-zeroes", "discard", "read-only"];

/// The nodes of a disk, each with its original options.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskNodes {
    pub(super) above: Above,
    pub(super) file: Map<String, Value>,
    pub(super) file_name: String,
    /// Whether the image's file grows while the disk is used.
    pub(super) grows: bool,
    /// Set if the node of the file cannot be created again as it was. It is kept in QEMU while the
    /// disk export is in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) held: Option<Held>,
}

/// The parent of the file's node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Above {
    /// A format node: its name and options.
    Format(String, Map<String, Value>),
    /// A device: its path.
    Device(String),
    /// A node whose options are QEMU's own matter: its name.
    Node(String),
}

/// Why no node can be inserted between the nodes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("this disk cannot be moved while it is in use: {why}")]
pub struct NodesError {
    why: String,
    hint: &'static str,
    is_tracked: bool,
}

impl NodesError {
    pub(super) fn new(why: impl Into<String>, hint: &'static str) -> Self {
        let why = why.into();
        Self {
            why,
            hint,
            is_tracked: false,
        }
    }

    /// The error of a disk whose writes are tracked: a move ends that first.
    pub(super) fn tracked() -> Self {
        Self {
            is_tracked: true,
            ..Self::new("its writes are tracked", "end that first")
        }
    }

    /// Returns whether nothing is wrong but that the disk's writes are tracked.
    pub fn is_tracked(&self) -> bool {
        self.is_tracked
    }

    /// Returns what to do about it.
    pub fn hint(&self) -> &'static str {
        self.hint
    }
}

pub(super) fn refuse<T>(why: impl Into<String>) -> Result<T, NodesError> {
    let hint = "shut the guest down, convert the image to a qcow2 image of its own \
                (`qemu-img convert -O qcow2`), and start the guest with that";
    Err(NodesError::new(why, hint))
}

pub(super) fn text<'a>(options: &'a Map<String, Value>, key: &str) -> Option<&'a str> {
    options.get(key).and_then(Value::as_str)
}

impl DiskNodes {
    /// Creates the nodes of a disk with a format node, from all options, as `blockdev-add` takes
    /// them: on reopening, QEMU resets omitted options to their defaults.
    pub fn new(format: Map<String, Value>, file: Map<String, Value>) -> Result<Self, NodesError> {
        let (file_name, driver) = check_file(&file)?;
        let Some(format_name) = text(&format, "node-name").map(str::to_owned) else {
            return refuse("its format node has no name");
        };
        if text(&format, "file") != Some(&file_name) {
            return refuse("its format node does not name the node of its file");
        }
        let grows = match text(&format, "driver") {
            Some("raw") => false,
            Some("qcow2") => {
                check_qcow2(&format, &file)?;
                driver == "file"
            }
            _ => return refuse("its format is neither raw nor qcow2"),
        };
        Ok(Self {
            above: Above::Format(format_name, format),
            file,
            file_name,
            grows,
            held: None,
        })
    }

    /// Creates the nodes of a device directly on the node of its file, without a format node: its
    /// path in QEMU's object tree, as `query-block` has it
    /// (`/machine/peripheral/vda/virtio-backend`).
    pub fn direct(device: String, file: Map<String, Value>) -> Result<Self, NodesError> {
        let (file_name, _) = check_file(&file)?;
        if !device.starts_with("/machine/") {
            return refuse("its device has no path in QEMU's machine");
        }
        Ok(Self {
            above: Above::Device(device),
            file,
            file_name,
            grows: false,
            held: None,
        })
    }

    /// Returns the parent of the file's node, by its name or path.
    pub(super) fn above_name(&self) -> &str {
        match &self.above {
            Above::Format(name, _) | Above::Device(name) | Above::Node(name) => name,
        }
    }

    /// Returns the current child of that parent.
    pub(super) fn below<'a>(&self, graph: &'a Graph) -> Option<&'a String> {
        match &self.above {
            Above::Format(name, _) | Above::Node(name) => graph.child(name, "file"),
            Above::Device(path) => graph.root(path),
        }
    }

    /// Returns the format node that a device without one gets with a disk export.
    pub(super) fn wrapper(&self, front: &Front) -> Option<String> {
        let is_direct = matches!(self.above, Above::Device(_));
        is_direct.then(|| format!("{}-raw", front.node))
    }

    /// Returns the node in the place of the file's while a disk export is in use.
    pub(super) fn standing(&self, front: &Front) -> String {
        self.wrapper(front).unwrap_or_else(|| front.node.clone())
    }

    /// Returns the options of the node that replaces the file's.
    pub(super) fn kept(&self) -> impl Iterator<Item = (&str, &Value)> {
        let kept = KEPT.iter().copied();
        kept.filter_map(|key| Some((key, self.file.get(key)?)))
    }
}

/// Returns all options of a format node on another child.
pub(super) fn reopened(
    name: &str,
    options: &Map<String, Value>,
    below: &str,
    graph: &Graph,
) -> Map<String, Value> {
    let mut options = options.clone();
    options.insert("file".to_owned(), below.into());
    // QEMU requires it also where the image's header gave it. A job such as `block-stream` may have
    // changed it since.
    match graph.child(name, "backing") {
        Some(backing) => {
            options.insert("backing".to_owned(), backing.as_str().into());
        }
        None => {
            if let Some(backing) = options.get_mut("backing") {
                *backing = Value::Null;
            }
        }
    }
    options
}

/// Returns the name and the driver of a file's node that can be created again.
fn check_file(file: &Map<String, Value>) -> Result<(String, &str), NodesError> {
    let Some(name) = text(file, "node-name") else {
        return refuse("the node of its file has no name");
    };
    match text(file, "driver") {
        Some(driver @ ("file" | "host_device")) => Ok((name.to_owned(), driver)),
        Some(driver) => refuse(format!(
            "its image is not a file or block device of this host (`{driver}`)"
        )),
        None => refuse("the node of its file has no driver"),
    }
}

fn check_qcow2(format: &Map<String, Value>, file: &Map<String, Value>) -> Result<(), NodesError> {
    for (key, what) in [
        ("data-file", "its content stands in a second file"),
        ("encrypt", "its image is encrypted"),
    ] {
        if format.contains_key(key) {
            return refuse(format!("{what} (`{key}`)"));
        }
    }
    if format.get("backing").is_some_and(Value::is_object) {
        return refuse("its backing image is described in its format node: give that a node");
    }
    let name = text(file, "filename").unwrap_or_default();
    if name.starts_with("/dev/fdset/") {
        return refuse("its image was handed to QEMU open, and cannot be opened again");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::drives::Drives;
    use super::*;
    use serde_json::json;

    fn object(value: Value) -> Map<String, Value> {
        value.as_object().unwrap().clone()
    }

    #[test]
    fn nodes_that_could_not_be_put_back_as_they_were_are_refused() {
        let file = json!({"node-name": "f", "driver": "file", "discard": "unmap"});
        let raw = json!({"node-name": "d", "driver": "raw", "file": "f", "offset": 512});
        let qcow2 = json!({"node-name": "d", "driver": "qcow2", "file": "f", "backing": "b"});
        let grows = |format: &Value, file: &Value| {
            DiskNodes::new(object(format.clone()), object(file.clone())).map(|nodes| nodes.grows)
        };
        assert_eq!(grows(&raw, &file), Ok(false));
        assert_eq!(grows(&qcow2, &file), Ok(true));
        let device = json!({"node-name": "f", "driver": "host_device", "filename": "/dev/x"});
        assert_eq!(grows(&qcow2, &device), Ok(false));
        for wrong in [
            json!({"driver": "raw", "file": "f"}),
            json!({"node-name": "d", "driver": "raw", "file": "other"}),
            json!({"node-name": "d", "driver": "raw", "file": {"driver": "file"}}),
            json!({"node-name": "d", "driver": "vmdk", "file": "f"}),
            json!({"node-name": "d", "driver": "qcow2", "file": "f", "data-file": "e"}),
            json!({"node-name": "d", "driver": "qcow2", "file": "f", "encrypt": {}}),
            json!({"node-name": "d", "driver": "qcow2", "file": "f", "backing": {}}),
        ] {
            grows(&wrong, &file).expect_err(&wrong.to_string());
        }
        for wrong in [
            json!({"driver": "file"}),
            json!({"node-name": "f"}),
            json!({"node-name": "f", "driver": "nbd"}),
        ] {
            grows(&raw, &wrong).expect_err(&wrong.to_string());
            DiskNodes::direct("/machine/x".to_owned(), object(wrong)).unwrap_err();
        }
        let handed = json!({"node-name": "f", "driver": "file", "filename": "/dev/fdset/3"});
        grows(&qcow2, &handed).unwrap_err();
        assert_eq!(grows(&raw, &handed), Ok(false));
        DiskNodes::direct("vda".to_owned(), object(file)).unwrap_err();
    }

    #[test]
    fn a_format_node_is_reopened_with_the_backing_node_that_it_has() {
        let graph = |edges: Value| {
            let nodes = json!([
                {"id": 1, "type": "block-driver", "name": "d"},
                {"id": 2, "type": "block-driver", "name": "b"},
            ]);
            let graph = json!({"nodes": nodes, "edges": edges});
            Graph::read(&graph, &Drives::of(json!([]))).unwrap()
        };
        let on_one = graph(json!([{"parent": 1, "child": 2, "name": "backing"}]));
        let on_none = graph(json!([]));
        let plain = json!({"driver": "qcow2", "node-name": "d", "file": "f"});
        let named = json!({"driver": "qcow2", "node-name": "d", "file": "f", "backing": "b"});
        let streamed = json!({"driver": "qcow2", "node-name": "d", "file": "f", "backing": "c"});
        for (options, graph, expected) in [
            (&plain, &on_one, Some(json!("b"))),
            (&plain, &on_none, None),
            (&named, &on_one, Some(json!("b"))),
            (&named, &on_none, Some(Value::Null)),
            (&streamed, &on_one, Some(json!("b"))),
        ] {
            let reopened = reopened("d", &object(options.clone()), "n", graph);
            assert_eq!(reopened["file"], "n");
            assert_eq!(reopened.get("backing"), expected.as_ref(), "{options}");
        }
    }
}
