//! Finds the nodes of a disk of a running QEMU: their names by QMP, their options from its command
//! line.

use super::graph::Graph;
use super::nodes::{DiskNodes, NodesError, refuse, text};
use crate::qmp::{Qmp, QmpError};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Why the nodes of a disk are not known.
#[derive(Debug, Clone, thiserror::Error)]
pub enum FindError {
    /// No node can be inserted between them.
    #[error(transparent)]
    Nodes(#[from] NodesError),
    /// QEMU did not answer.
    #[error(transparent)]
    Qmp(#[from] QmpError),
}

/// Returns the nodes of a device's disk, by its path in QEMU's object tree, as `query-block` has it
/// (`/machine/peripheral/vda/virtio-backend`), and by QEMU's arguments.
pub async fn find(qmp: &Qmp, arguments: &[String], device: &str) -> Result<DiskNodes, FindError> {
    let graph = Graph::ask(qmp).await?;
    let Some(top) = graph.child(device, "root") else {
        return Ok(refuse(format!("{device} is no disk's device"))?);
    };
    Ok(read(arguments, device, top)?)
}

fn read(arguments: &[String], device: &str, top: &str) -> Result<DiskNodes, NodesError> {
    let mut nodes = nodes(arguments);
    let mut take = |name: &str| match nodes.remove(name) {
        Some(options) => Ok(options),
        None => refuse(format!(
            "its node `{name}` was not made by a -blockdev in JSON on QEMU's command line"
        )),
    };
    let above = take(top)?;
    match text(&above, "driver") {
        Some("file" | "host_device") => DiskNodes::direct(device.to_owned(), above),
        _ => match text(&above, "file").map(str::to_owned) {
            Some(file) => DiskNodes::new(above, take(&file)?),
            None => refuse("its format node does not name the node of its file"),
        },
    }
}

/// Returns the nodes that a command line creates, by name.
fn nodes(arguments: &[String]) -> BTreeMap<String, Map<String, Value>> {
    let options = arguments.windows(2).filter_map(|words| match words {
        [option, value] if option == "-blockdev" || option == "--blockdev" => Some(value),
        _ => None,
    });
    let options = options.filter_map(|value| match serde_json::from_str(value) {
        Ok(Value::Object(options)) => Some(options),
        _ => None,
    });
    options
        .filter_map(|options| Some((text(&options, "node-name")?.to_owned(), options)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: &str = "/machine/peripheral/vda/virtio-backend";

    fn line(words: &str) -> Vec<String> {
        words.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn nodes_are_found_by_the_command_line_that_made_them() {
        let line = line(
            r#"qemu -blockdev {"driver":"file","node-name":"f","filename":"/x"}
            -blockdev {"driver":"raw","node-name":"d","file":"f","discard":"unmap"}
            -blockdev driver=raw,node-name=w,file=f -device virtio-blk-pci,drive=d
            -blockdev {"driver":"raw","node-name":"i","file":{"driver":"file"}}
            -blockdev {"driver":"raw","node-name":"m","file":"g"}"#,
        );
        let found = read(&line, DEVICE, "d").unwrap();
        assert_eq!((found.above_name(), &*found.file_name), ("d", "f"));
        let found = read(&line, DEVICE, "f").unwrap();
        assert_eq!((found.above_name(), &*found.file_name), (DEVICE, "f"));
        for (top, why) in [
            ("w", "`w` was not made"),
            ("#block123", "`#block123` was not made"),
            ("i", "does not name the node"),
            ("m", "`g` was not made"),
        ] {
            let refusal = read(&line, DEVICE, top).unwrap_err().to_string();
            assert!(refusal.contains(why), "{refusal}");
        }
    }
}
