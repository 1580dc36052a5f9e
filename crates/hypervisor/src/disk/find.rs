//! Finds the nodes of a disk of a running QEMU, however the disk was given.
//!
//! QEMU is asked for the nodes and their properties. Its command line adds the options of nodes
//! that are there in full, as `-blockdev` in JSON. The nodes of all other disks are kept instead of
//! being created again ([`super::held`]).

use super::drives::{Drive, drives};
use super::graph::{FILTERS, Graph, Known, is_of_job};
use super::held::Held;
use super::nodes::{Above, DiskNodes, NodesError, refuse, text};
use super::threads::has_thread;
use crate::observe::Blocker;
use crate::open_files::open_files;
use crate::process_path::{opens_again, seen_from_here};
use crate::qmp::{Qmp, QmpError};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The maximum length of a command line, in bytes.
const COMMAND_LINE_BYTES_MAX: usize = 1 << 20;

/// How the name of an export's node begins.
const OURS: &str = "lh-";
/// How the names of the nodes of exports begin that track writes without a move.
const TRACKING_NODE: &str = "lh-track-";

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

/// Returns how the name of an export's node begins.
pub fn node_prefix(tracks: bool) -> &'static str {
    match tracks {
        true => TRACKING_NODE,
        false => OURS,
    }
}

/// Returns the path in QEMU's object tree of the device that has this image of ours in it. The
/// process is QEMU's.
pub async fn device_of(qmp: &Qmp, pid: i32, image: &Path) -> Result<String, FindError> {
    let drives = drives(qmp).await?;
    let mut of = drives.iter().filter(|drive| drive.has(image, pid));
    match (of.next(), of.next()) {
        (Some(Drive { device, .. }), None) => Ok(device.clone()),
        (Some(_), Some(_)) => {
            let why = format!("two of its devices use {}", image.display());
            let hint = "unplug one of them (QMP `device_del`), or start the guest with one";
            Err(NodesError::new(why, hint).into())
        }
        (None, _) => {
            let why = format!("none of its devices uses {} now", image.display());
            let hint = "name the image that its QEMU uses in the agent's configuration, under the \
                        path by which QEMU opened it; if a snapshot or a mirror was made, commit \
                        the overlay (QMP `block-commit`)";
            Err(NodesError::new(why, hint).into())
        }
    }
}

/// Returns the nodes of a device's disk, by its path in QEMU's object tree. The process is QEMU's.
pub async fn find(qmp: &Qmp, pid: i32, device: &str) -> Result<DiskNodes, FindError> {
    let (graph, known) = tokio::try_join!(Graph::ask(qmp), Known::ask(qmp))?;
    let line = command_line(pid);
    let mut found = read(&line, device, &graph, &known)?;
    if found.held.is_none() {
        return Ok(found);
    }
    let stays_open = stays_open(qmp, pid, &found).await?;
    let image = match found.grows {
        true => Some(image(qmp, pid, &found.file).await?),
        false => None,
    };
    found.held = Some(Held {
        device: device.to_owned(),
        pid,
        image,
        stays_open,
    });
    Ok(found)
}

/// Returns whether a disk's file must stay open, because QEMU does not find it again.
async fn stays_open(qmp: &Qmp, pid: i32, nodes: &DiskNodes) -> Result<bool, FindError> {
    let is_read_only = nodes.file.get("read-only") == Some(&Value::Bool(true));
    let name = text(&nodes.file, "filename").unwrap_or_default();
    if is_read_only || opens_again(pid, Path::new(name)) {
        return Ok(false);
    }
    // The locks of a growing image leave no permission that keeps it open. The node that keeps it
    // open is made while the guest runs, and QEMU 10.0 aborts if an I/O thread uses the disk.
    if nodes.grows || has_thread(qmp, nodes).await? {
        let why = format!(
            "its QEMU became a daemon and does not find {name} in `/`, where it would open it again"
        );
        let hint = "start the guest with the image's whole path";
        return Err(NodesError::new(why, hint).into());
    }
    Ok(true)
}

/// Returns the nodes of a device's disk that has a disk export below it, for which no nodes were
/// noted: an earlier version did so for nodes that are on the command line in full.
pub async fn find_below_export(qmp: &Qmp, pid: i32, device: &str) -> Result<DiskNodes, FindError> {
    let graph = Graph::ask(qmp).await?;
    let line = command_line(pid);
    let mut nodes = nodes(&line);
    let above = graph.root(device).and_then(|top| nodes.remove(top));
    let Some(above) = above else {
        return Ok(refuse(format!(
            "the nodes of {device} are not on its command line"
        ))?);
    };
    let file = text(&above, "file").and_then(|file| nodes.remove(file));
    match file {
        Some(file) => Ok(DiskNodes::new(above, file)?),
        None => Ok(DiskNodes::direct(device.to_owned(), above)?),
    }
}

/// Returns the reasons why disks of a guest cannot be moved while it runs, with their names and
/// their images. That writes are tracked is none: a move ends it. Asks only.
pub async fn refusals(
    qmp: &Qmp,
    pid: i32,
    disks: &[(&str, &Path)],
) -> Result<Vec<Blocker>, QmpError> {
    let mut refusals = Vec::new();
    for (name, image) in disks {
        let find = async || find(qmp, pid, &device_of(qmp, pid, image).await?).await;
        match find().await {
            Ok(_) => {}
            Err(FindError::Qmp(error)) => return Err(error),
            Err(FindError::Nodes(error)) if error.is_tracked() => {}
            Err(FindError::Nodes(error)) => refusals.push(Blocker {
                text: format!("disk {name}: {error}"),
                hint: error.hint().to_owned(),
            }),
        }
    }
    Ok(refusals)
}

/// Returns the arguments of a process. They only add to what QEMU reports, and may be unreadable.
fn command_line(pid: i32) -> Vec<String> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    if line.len() > COMMAND_LINE_BYTES_MAX {
        return Vec::new();
    }
    let words = line.split(|byte| *byte == 0);
    words
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect()
}

fn read(
    arguments: &[String],
    device: &str,
    graph: &Graph,
    known: &Known,
) -> Result<DiskNodes, NodesError> {
    let Some(top) = graph.root(device) else {
        let hint = "attach to the guest again, if the disk was plugged in or out since; if it is a \
                    drive without a medium, insert one";
        return Err(NodesError::new(
            format!("its device {device} has no image now"),
            hint,
        ));
    };
    let mut chain = vec![top];
    while let Some(below) = graph.child(chain[chain.len() - 1], "file") {
        chain.push(below);
    }
    let (above, node) = match &*chain {
        [.., above, node] => (Some(*above), *node),
        _ => (None, top),
    };
    let listed = on_line(arguments, device, above, node);
    let mut grows = false;
    for pair in chain.windows(2) {
        grows |= passes_on((pair[0], pair[1]), graph, known, listed.is_some())?;
    }
    let driver = known.driver(node).unwrap_or_default();
    if driver == "nbd" && node.starts_with(TRACKING_NODE) {
        return Err(NodesError::tracked());
    }
    if driver == "nbd" && node.starts_with(OURS) {
        let hint = "wait until the agent has removed it; its log says what prevents that";
        let why = "a disk export from an earlier move is still below it";
        return Err(NodesError::new(why, hint));
    }
    if !matches!(&*driver, "file" | "host_device") {
        return Err(other_driver(&driver));
    }
    if let Some(listed) = listed {
        return Ok(listed);
    }
    let above = match above {
        Some(above) => Above::Node(above.clone()),
        None => Above::Device(device.to_owned()),
    };
    Ok(DiskNodes {
        file: options_of(arguments, &above, node, known),
        file_name: node.clone(),
        above,
        grows: grows && driver == "file",
        held: Some(Held {
            device: device.to_owned(),
            pid: 0,
            image: None,
            stays_open: false,
        }),
    })
}

/// Checks a node above the node of the disk's file. Returns whether it lets the file grow.
/// `listed`: whether its options are known.
fn passes_on(
    (node, below): (&str, &str),
    graph: &Graph,
    known: &Known,
    listed: bool,
) -> Result<bool, NodesError> {
    let driver = known.driver(node).unwrap_or_default();
    if known.is_encrypted(node) {
        return refuse("its image is encrypted");
    }
    match &*driver {
        filter if FILTERS.contains(&filter) => Ok(false),
        "raw" => {
            let bytes = |node: &str| known.size_bytes(node).unwrap_or_default();
            let all = bytes(node).next_multiple_of(512) == bytes(below).next_multiple_of(512);
            match all || listed {
                true => Ok(false),
                false => refuse("only a part of its file is the disk (`offset`, `size`)"),
            }
        }
        "qcow2" => match graph.child(node, "data-file") {
            None => Ok(true),
            Some(_) => refuse("its content stands in a second file (`data-file`)"),
        },
        other => Err(other_driver(other)),
    }
}

fn other_driver(driver: &str) -> NodesError {
    if is_of_job(driver) {
        let hint = "let the job end, or end it (QMP `job-cancel`)";
        return NodesError::new(format!("a job works on it (`{driver}`)"), hint);
    }
    let formats = [
        "bochs",
        "cloop",
        "dmg",
        "luks",
        "parallels",
        "qcow",
        "qed",
        "vdi",
        "vhdx",
        "vmdk",
        "vpc",
    ];
    match formats.contains(&driver) {
        true => NodesError::new(
            format!("its format is neither raw nor qcow2 (`{driver}`)"),
            "shut the guest down, convert the image (`qemu-img convert -O qcow2`), and start the \
             guest with that",
        ),
        false => NodesError::new(
            format!("its image is not a file or block device of this host (`{driver}`)"),
            "describe its image as shared, if both hosts reach it; otherwise copy it to a file \
             with the guest shut down, and start the guest with that",
        ),
    }
}

/// Returns the nodes if the command line has all of their options.
fn on_line(
    arguments: &[String],
    device: &str,
    above: Option<&String>,
    node: &str,
) -> Option<DiskNodes> {
    let mut nodes = nodes(arguments);
    let file = nodes.remove(node)?;
    // QEMU cannot open a relative name again if it became a daemon since.
    if text(&file, "filename").is_some_and(|name| Path::new(name).is_relative()) {
        return None;
    }
    let found = match above {
        Some(above) => DiskNodes::new(nodes.remove(above)?, file),
        None => DiskNodes::direct(device.to_owned(), file),
    };
    // The others can be held.
    found.ok()
}

/// Returns the options of a file's node that also apply to the disk export's.
fn options_of(
    arguments: &[String],
    above: &Above,
    node: &str,
    known: &Known,
) -> Map<String, Value> {
    let mut options = Map::new();
    options.insert("node-name".to_owned(), node.into());
    options.insert("driver".to_owned(), known.driver(node).into());
    options.insert("filename".to_owned(), known.file(node).into());
    if let Some(cache) = known.entry(node, "cache") {
        let cache = json!({"direct": cache["direct"], "no-flush": cache["no-flush"]});
        options.insert("cache".to_owned(), cache);
    }
    let zeroes = known.entry(node, "detect_zeroes");
    options.extend(
        zeroes
            .clone()
            .map(|zeroes| ("detect-zeroes".to_owned(), zeroes)),
    );
    let read_only = known.entry(node, "ro");
    options.extend(read_only.map(|ro| ("read-only".to_owned(), ro)));
    // QEMU does not report this one. A node above drops the guest's discards by its own option.
    let unmap = match above {
        Above::Device(_) => zeroes == Some("unmap".into()) || unmaps(arguments, node),
        Above::Format(..) | Above::Node(_) => true,
    };
    if unmap {
        options.insert("discard".to_owned(), "unmap".into());
    }
    options
}

/// Returns whether the command line lets a node pass discards on.
fn unmaps(arguments: &[String], node: &str) -> bool {
    let named = format!("node-name={node}");
    arguments.iter().any(|argument| {
        let mut words = argument.split(',');
        words.clone().any(|word| word == named)
            && words.any(|word| matches!(word, "discard=unmap" | "discard=on"))
    })
}

/// Returns device and inode of an image that QEMU has open.
async fn image(qmp: &Qmp, pid: i32, file: &Map<String, Value>) -> Result<(u64, u64), FindError> {
    let name = text(file, "filename").unwrap_or_default();
    let handed = match name.strip_prefix("/dev/fdset/") {
        Some(set) => handed(qmp, set).await?,
        None => None,
    };
    let path = match handed {
        Some(fd) => format!("/proc/{pid}/fd/{fd}").into(),
        None => seen_from_here(pid, Path::new(name)),
    };
    let wanted = fs::metadata(path).ok().map(|file| (file.dev(), file.ino()));
    let open = open_files(pid).map(|files| {
        let files = files.filter_map(Result::ok);
        files
            .map(|file| (file.metadata().dev(), file.metadata().ino()))
            .collect::<Vec<_>>()
    });
    match wanted {
        Some(wanted) if open.is_ok_and(|open| open.contains(&wanted)) => Ok(wanted),
        _ => {
            let why = format!("{name} is not the file that its QEMU has open");
            let hint = "give the file that QEMU uses its name back; if the name is relative, start \
                        the guest with the whole path";
            Err(NodesError::new(why, hint).into())
        }
    }
}

/// Returns a descriptor in QEMU of a set of descriptors that it was given.
async fn handed(qmp: &Qmp, set: &str) -> Result<Option<u64>, QmpError> {
    let sets = qmp.query("query-fdsets").await?;
    let mut sets = sets.as_array().into_iter().flatten();
    let found = sets.find(|one| Some(one["fdset-id"].to_string()) == Some(set.to_owned()));
    Ok(found.and_then(|set| set["fds"][0]["fd"].as_u64()))
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
    use super::super::drives::Drives;
    use super::*;

    const DEVICE: &str = "/machine/peripheral/vda/virtio-backend";

    fn line(words: &str) -> Vec<String> {
        words.split_whitespace().map(str::to_owned).collect()
    }

    /// Reads a chain of nodes from the device down: names, drivers and sizes.
    fn chain(line: &[String], chain: &[(&str, &str, u64)]) -> Result<DiskNodes, NodesError> {
        let drives = Drives::of(json!([{"device": "drive0", "qdev": DEVICE}]));
        let mut nodes = vec![json!({"id": 0, "type": "block-backend", "name": "drive0"})];
        let mut edges = Vec::new();
        let mut known = Vec::new();
        for (n, (name, driver, size)) in chain.iter().enumerate() {
            nodes.push(json!({"id": n + 1, "type": "block-driver", "name": name}));
            let edge = if n == 0 { "root" } else { "file" };
            edges.push(json!({"parent": n, "child": n + 1, "name": edge}));
            known.push(
                json!({"node-name": name, "drv": driver, "file": "/x", "ro": false,
                "detect_zeroes": "off", "image": {"virtual-size": size},
                "cache": {"direct": true, "no-flush": false, "writeback": true}}),
            );
        }
        let graph = Graph::read(&json!({"nodes": nodes, "edges": edges}), &drives).unwrap();
        read(line, DEVICE, &graph, &Known::of(known.into()))
    }

    #[test]
    fn nodes_of_the_command_line_are_taken_with_its_options() {
        let line = line(
            r#"qemu -blockdev {"driver":"file","node-name":"f","filename":"/x"}
            -blockdev {"driver":"raw","node-name":"d","file":"f","discard":"unmap"}
            -blockdev driver=raw,node-name=w,file=f -device virtio-blk-pci,drive=d"#,
        );
        let found = chain(&line, &[("d", "raw", 512), ("f", "file", 512)]).unwrap();
        assert_eq!((found.above_name(), &*found.file_name), ("d", "f"));
        assert_eq!(found.held, None);
        let found = chain(&line, &[("f", "file", 512)]).unwrap();
        assert_eq!((found.above_name(), &*found.file_name), (DEVICE, "f"));
        assert_eq!(found.held, None);
        let found = chain(&line, &[("w", "raw", 512), ("f", "file", 512)]).unwrap();
        assert_eq!((found.above_name(), found.held.is_some()), ("w", true));
    }

    #[test]
    fn nodes_without_a_line_of_their_own_are_held() {
        let words = line("qemu -blockdev driver=file,node-name=u,filename=/x,discard=unmap");
        for (nodes, above, file, grows) in [
            (
                &[("#1", "raw", 512), ("#2", "file", 512)][..],
                "#1",
                "#2",
                false,
            ),
            (&[("#1", "qcow2", 9), ("#2", "file", 1)], "#1", "#2", true),
            (
                &[("#1", "qcow2", 9), ("#2", "host_device", 1)],
                "#1",
                "#2",
                false,
            ),
            (
                &[
                    ("t", "throttle", 9),
                    ("c", "copy-on-read", 9),
                    ("#1", "qcow2", 9),
                    ("u", "throttle", 1),
                    ("#2", "file", 1),
                ],
                "u",
                "#2",
                true,
            ),
            (&[("#2", "file", 512)], DEVICE, "#2", false),
        ] {
            let found = chain(&words, nodes).unwrap();
            assert_eq!((found.above_name(), &*found.file_name), (above, file));
            assert_eq!((found.held.is_some(), found.grows), (true, grows));
        }
        let kept = |name| {
            let found = chain(&words, &[(name, "file", 512)]).unwrap();
            Value::Object(
                found
                    .kept()
                    .map(|(key, it)| (key.to_owned(), it.clone()))
                    .collect(),
            )
        };
        let cache = json!({"direct": true, "no-flush": false});
        let expected = json!({"cache": cache, "detect-zeroes": "off", "read-only": false});
        assert_eq!(kept("#2"), expected);
        assert_eq!(kept("u")["discard"], "unmap");
    }

    #[test]
    fn what_cannot_be_taken_is_refused_with_what_to_do() {
        for (nodes, why, hint) in [
            (&[][..], "has no image now", "insert one"),
            (
                &[("#1", "vmdk", 1), ("#2", "file", 1)],
                "neither raw nor qcow2",
                "convert",
            ),
            (
                &[("#1", "mirror_top", 1), ("#2", "file", 1)],
                "a job works",
                "job-cancel",
            ),
            (
                &[("#1", "raw", 1), ("#2", "nbd", 1)],
                "not a file",
                "shared",
            ),
            (
                &[("#1", "raw", 512), ("#2", "file", 1024)],
                "only a part",
                "convert",
            ),
        ] {
            let refusal = chain(&[], nodes).unwrap_err();
            assert!(refusal.to_string().contains(why), "{refusal}");
            assert!(refusal.hint().contains(hint), "{refusal}");
        }
    }
}
