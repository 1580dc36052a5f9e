//! Inserts a disk export below a guest's disk while the guest runs, and removes it: an NBD node
//! replaces the node of the disk's file.
//!
//! Each direction is one command: QEMU drains the disk's requests, exchanges the node, and goes on.
//! Both may be repeated when their result is unknown.

mod backing;
pub mod base;
mod drives;
mod find;
mod graph;
mod held;
mod jobs;
mod layout;
mod losses;
mod nodes;
mod threads;

pub use backing::{Backing, backing};
pub(crate) use drives::device_path;
pub use drives::{Drive, Inserted, drives};
pub use find::{FindError, device_of, find, find_below_export, node_prefix, refusals};
pub(crate) use graph::is_of_job;
pub use held::keep_open;
pub use jobs::busy;
pub use layout::{Layout, LayoutChanged};
pub use losses::{DiskExport, Limits, Losses, LostBitmap, exports, losses};
pub use nodes::{DiskNodes, NodesError};

use crate::process_path::absolute;
use crate::qmp::{COMMAND_TIMEOUT, Qmp, QmpError};
use graph::{Graph, Known};
use held::{hold, remember_length};
use nodes::{Above, reopened};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use threads::has_thread;

/// The folder of this host's base images, below that of the agent's state.
pub const BASES: &str = "bases";
/// The time limit for QEMU to drain the disk's requests and exchange the node.
const REOPEN_TIMEOUT: Duration = Duration::from_secs(60);
/// The interval between two polls for the end of a job.
const JOB_POLL: Duration = Duration::from_millis(2);
/// How long QEMU tries to reach a lost disk export before its guest gets errors. Requests wait in
/// the meantime.
const RECONNECT_SECONDS: u64 = 3600;

/// A disk as a disk export shows it.
#[derive(Debug, Clone)]
pub struct Front {
    /// QEMU's name for its node, which is used once.
    pub node: String,
    /// The socket of the disk export.
    pub socket: PathBuf,
    /// The name of the export.
    pub export: String,
}

/// An unexpected node is below a disk.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the disk {above} stands on {} and not on {expected}: somebody else changes this guest's \
     disks; nothing was changed", found.as_deref().unwrap_or("nothing")
)]
pub struct OtherBelow {
    /// The format node or device.
    above: String,
    /// The expected node below.
    expected: String,
    /// The node found there.
    found: Option<String>,
}

impl OtherBelow {
    fn new(nodes: &DiskNodes, expected: &str, found: Option<&String>) -> Self {
        Self {
            above: nodes.above_name().to_owned(),
            expected: expected.to_owned(),
            found: found.cloned(),
        }
    }
}

/// Why a disk export is not below a disk.
#[derive(Debug, Clone, thiserror::Error)]
pub enum InsertError {
    /// An unexpected node is below the disk.
    #[error(transparent)]
    Other(#[from] OtherBelow),
    /// The disk export has another size than the file, or a smaller one for an image that grows.
    /// QEMU would accept it, and the guest's disk would shrink or grow.
    #[error(
        "the agent shows {shown_bytes} bytes of a disk that has {file_bytes}: its image has \
         changed since it was looked at; the disk is used as before"
    )]
    Size {
        /// The size that the disk export shows.
        shown_bytes: u64,
        /// The size of the file.
        file_bytes: u64,
    },
    /// The guest runs, and an I/O thread uses the disk: QEMU may abort during the exchange.
    #[error(
        "the disk {0} can be reached through the agent only when the guest has stood still for a \
         moment; it is used as before"
    )]
    Runs(String),
    /// The change failed; the guest goes on as before.
    #[error("{0}; the disk is used as before")]
    Refused(QmpError),
    /// The result of the change is unknown.
    #[error("{0}; it is not known which way the disk is used now: try again, or take it out")]
    InDoubt(QmpError),
    /// The guest was stopped for the change, and may not run again.
    #[error(
        "{0}; the guest was stopped for a moment and may still be: `longhaul guests resume` lets \
         it run again"
    )]
    Stopped(QmpError),
}

/// Why a disk export is still below a disk, or may be.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RemoveError {
    /// An unexpected node is below the disk.
    #[error(transparent)]
    Other(#[from] OtherBelow),
    /// The guest runs, and its image's file grows: QEMU would miss writes during the exchange. Or
    /// an I/O thread uses the disk.
    #[error(
        "the disk {0} can be given its image back only while the guest is stopped; the disk is \
         still used through the agent"
    )]
    Runs(String),
    /// The change failed; the disk export must go on.
    #[error(
        "{0}; the disk is still used through the agent, which must go on; does somebody hold a \
         lock on its image?"
    )]
    Refused(QmpError),
    /// The length of the image's file is unknown to QEMU, or to us.
    #[error(
        "the length of its image is not known: {0}; the disk is still used through the agent, \
         which tries again"
    )]
    Length(String),
    /// The result of the change is unknown; the disk export must go on until it is known.
    #[error("{0}; it is not known which way the disk is used now: try again")]
    InDoubt(QmpError),
    /// The guest was stopped for the change, and may not run again.
    #[error(
        "{0}; the guest was stopped for a moment and may still be: `longhaul guests resume` lets \
         it run again"
    )]
    Stopped(QmpError),
}

/// The failure of a command that changes something.
enum Change {
    /// The command had no effect.
    No(QmpError),
    /// The command may have had its effect.
    Perhaps(QmpError),
}

impl From<QmpError> for Change {
    fn from(error: QmpError) -> Self {
        match error {
            QmpError::Refused { .. } => Self::No(error),
            other => Self::Perhaps(other),
        }
    }
}

impl From<Change> for InsertError {
    fn from(change: Change) -> Self {
        match change {
            Change::No(error) => Self::Refused(error),
            Change::Perhaps(error) => Self::InDoubt(error),
        }
    }
}

impl From<Change> for RemoveError {
    fn from(change: Change) -> Self {
        match change {
            Change::No(error) => Self::Refused(error),
            Change::Perhaps(error) => Self::InDoubt(error),
        }
    }
}

/// Inserts a disk export below a disk. The export must answer already.
pub async fn insert(qmp: &Qmp, nodes: &DiskNodes, front: &Front) -> Result<(), InsertError> {
    let graph = Graph::ask(qmp).await.map_err(InsertError::Refused)?;
    let found = nodes.below(&graph);
    if found == Some(&nodes.standing(front)) {
        return Ok(());
    }
    if found != Some(&nodes.file_name) {
        return Err(OtherBelow::new(nodes, &nodes.file_name, found).into());
    }
    let thread = has_thread(qmp, nodes).await;
    if thread.map_err(InsertError::Refused)? && runs(qmp).await.map_err(InsertError::Refused)? {
        return Err(InsertError::Runs(nodes.above_name().to_owned()));
    }
    if nodes.grows && nodes.held.is_none() {
        try_file(qmp, nodes, front, &graph)
            .await
            .map_err(InsertError::Refused)?;
    }
    if !graph.has(&front.node) {
        // QEMU connects before it answers.
        add(qmp, front_options(nodes, front))
            .await
            .map_err(InsertError::Refused)?;
    }
    if let Some(wrapper) = nodes.wrapper(front)
        && !graph.has(&wrapper)
    {
        add(qmp, wrapper_options(nodes, &wrapper, &front.node))
            .await
            .map_err(InsertError::Refused)?;
    }
    hold(qmp, nodes, front, &graph)
        .await
        .map_err(InsertError::Refused)?;
    let exchanged = exchange(qmp, nodes, front, &graph).await;
    if exchanged.is_err() && !matches!(exchanged, Err(InsertError::InDoubt(_))) {
        // If they cannot be deleted either, they do no harm; the first error says more.
        let ours = [nodes.wrapper(front), nodes.holder(front)];
        for node in ours.into_iter().flatten().chain([front.node.clone()]) {
            let _ = delete(qmp, &node).await;
        }
    }
    exchanged
}

/// Exchanges the node of the disk's file for that of the disk export, which exists.
async fn exchange(
    qmp: &Qmp,
    nodes: &DiskNodes,
    front: &Front,
    graph: &Graph,
) -> Result<(), InsertError> {
    let known = Known::ask(qmp).await.map_err(InsertError::Refused)?;
    let size = |name: &str| known.size_bytes(name).map_err(InsertError::Refused);
    let (shown_bytes, file_bytes) = (size(&front.node)?, size(&nodes.file_name)?);
    if shown_bytes < file_bytes || (shown_bytes > file_bytes && !nodes.grows) {
        return Err(InsertError::Size {
            shown_bytes,
            file_bytes,
        });
    }
    Ok(put_below(qmp, nodes, &nodes.standing(front), graph).await?)
}

/// Removes a disk export from below a disk. QEMU then has the file again and takes its locks: ours
/// must be released before. The disk export must answer until this has returned. For an image that
/// grows the guest must be stopped: see [`remove_all`].
pub async fn remove(qmp: &Qmp, nodes: &DiskNodes, front: &Front) -> Result<(), RemoveError> {
    let graph = Graph::ask(qmp).await.map_err(RemoveError::InDoubt)?;
    let found = nodes.below(&graph);
    // An agent without wrappers may have inserted the disk export.
    let ours = [nodes.standing(front), front.node.clone()];
    let is_ours = found.is_some_and(|found| ours.contains(found));
    // Another client has put a node on it since, such as the overlay of a snapshot.
    let wrapper = nodes.wrapper(front).filter(|wrapper| {
        let is_used = !graph.parents(wrapper).is_empty();
        !is_ours && is_used && graph.child(wrapper, "file") == Some(&front.node)
    });
    if is_ours || wrapper.is_some() {
        let thread = has_thread(qmp, nodes).await;
        let thread = thread.map_err(RemoveError::Refused)?;
        let runs = runs(qmp).await.map_err(RemoveError::Refused)?;
        if (thread || nodes.grows) && runs {
            return Err(RemoveError::Runs(nodes.above_name().to_owned()));
        }
        if nodes.held.is_none() && (nodes.grows || !graph.has(&nodes.file_name)) {
            make_file(qmp, nodes, &graph).await?;
        } else if !runs {
            give_to_main_thread(qmp, &nodes.file_name)
                .await
                .map_err(RemoveError::Refused)?;
        }
        activate(qmp, nodes, front)
            .await
            .map_err(RemoveError::Refused)?;
        remember_length(qmp, nodes).await?;
        match &wrapper {
            // Its parents stay, and so does the wrapper.
            Some(wrapper) => {
                let options = wrapper_options(nodes, wrapper, &nodes.file_name);
                reopen(qmp, options).await.map_err(Change::from)?;
            }
            None => put_below(qmp, nodes, &nodes.file_name, &graph).await?,
        }
    } else if found != Some(&nodes.file_name) && !graph.has(&front.node) {
        return Err(OtherBelow::new(nodes, &front.node, found).into());
    }
    correct_backing_files(qmp, nodes, front).await?;
    let ended = nodes.wrapper(front).filter(|_| wrapper.is_none());
    let ours = [ended, Some(front.node.clone()), nodes.holder(front)];
    for node in ours.into_iter().flatten().filter(|node| graph.has(node)) {
        let deleted = delete(qmp, &node).await;
        deleted.map_err(RemoveError::InDoubt)?;
    }
    Ok(())
}

/// Corrects the backing files of overlays made while the disk export was in place: they name its
/// socket, which disappears afterwards. A job that streams nothing sets the image instead: QEMU's
/// own command for that (`change-backing-file`) writes the overlay's format where the image's
/// belongs.
async fn correct_backing_files(
    qmp: &Qmp,
    nodes: &DiskNodes,
    front: &Front,
) -> Result<(), RemoveError> {
    let Some(image) = nodes::text(&nodes.file, "filename") else {
        return Ok(());
    };
    // A relative name would be taken from the overlay's folder.
    let image = match &nodes.held {
        Some(held) => absolute(held.pid, Path::new(image)),
        None => PathBuf::from(image),
    };
    let look = async || tokio::try_join!(Known::ask(qmp), Graph::ask(qmp));
    let (known, graph) = look().await.map_err(RemoveError::Refused)?;
    for overlay in known.backed_by(&front.export) {
        let Some(base) = graph.child(overlay, "backing") else {
            continue;
        };
        let job = front.node.as_str();
        let stream = json!({
            "job-id": job, "device": overlay, "base-node": base, "backing-file": image,
        });
        let begun = qmp.execute("block-stream", stream, REOPEN_TIMEOUT).await;
        begun.map_err(Change::from)?;
        let until = Instant::now() + REOPEN_TIMEOUT;
        while has_job(qmp, job).await.map_err(RemoveError::InDoubt)? {
            if Instant::now() > until {
                return Err(RemoveError::InDoubt(QmpError::Timeout {
                    command: "block-stream".to_owned(),
                    waited: REOPEN_TIMEOUT,
                }));
            }
            tokio::time::sleep(JOB_POLL).await;
        }
    }
    let known = Known::ask(qmp).await.map_err(RemoveError::Refused)?;
    match known.backed_by(&front.export).first() {
        None => Ok(()),
        Some(overlay) => Err(RemoveError::Refused(QmpError::Answer {
            command: "block-stream".to_owned(),
            why: format!("the overlay {overlay} still names the agent as its backing file"),
        })),
    }
}

/// Returns whether QEMU has a job of this name; one that has ended is dismissed.
async fn has_job(qmp: &Qmp, id: &str) -> Result<bool, QmpError> {
    let jobs = qmp.query("query-jobs").await?;
    let mut jobs = jobs.as_array().into_iter().flatten();
    Ok(jobs.any(|job| job["id"] == id))
}

/// Inserts disk exports below disks. Stops the guest where that is necessary, and returns how long
/// it was stopped. After an error some exports may be in place: [`remove_all`] removes them. A
/// caller that may die in the middle records beforehand that it stops the guest
/// ([`insertion_stops`]).
pub async fn insert_all(
    qmp: &Qmp,
    disks: &[(&DiskNodes, &Front)],
) -> Result<Duration, InsertError> {
    let stop = insertion_stops(qmp, disks).await?;
    let insert_each = async || {
        for (nodes, front) in disks {
            insert(qmp, nodes, front).await?;
        }
        Ok(())
    };
    stopped(
        qmp,
        stop,
        insert_each,
        [InsertError::Refused, InsertError::Stopped],
    )
    .await
}

/// Removes disk exports from below disks. Stops the guest where that is necessary, and returns how
/// long it was stopped. A caller that may die in the middle records beforehand that it stops the
/// guest ([`removal_stops`]).
pub async fn remove_all(
    qmp: &Qmp,
    disks: &[(&DiskNodes, &Front)],
) -> Result<Duration, RemoveError> {
    let stop = removal_stops(qmp, disks).await?;
    let remove_each = async || {
        for (nodes, front) in disks {
            remove(qmp, nodes, front).await?;
        }
        Ok(())
    };
    stopped(
        qmp,
        stop,
        remove_each,
        [RemoveError::Refused, RemoveError::Stopped],
    )
    .await
}

/// Returns whether [`insert_all`] stops the guest as it is now.
pub async fn insertion_stops(
    qmp: &Qmp,
    disks: &[(&DiskNodes, &Front)],
) -> Result<bool, InsertError> {
    let mut needed = false;
    for (nodes, _) in disks {
        needed |= has_thread(qmp, nodes).await.map_err(InsertError::Refused)?;
    }
    Ok(needed && runs(qmp).await.map_err(InsertError::Refused)?)
}

/// Returns whether [`remove_all`] stops the guest as it is now.
pub async fn removal_stops(qmp: &Qmp, disks: &[(&DiskNodes, &Front)]) -> Result<bool, RemoveError> {
    let mut needed = false;
    for (nodes, _) in disks {
        needed |= nodes.grows || has_thread(qmp, nodes).await.map_err(RemoveError::Refused)?;
    }
    Ok(needed && runs(qmp).await.map_err(RemoveError::Refused)?)
}

/// Runs an operation, with the guest stopped if that is needed.
async fn stopped<E>(
    qmp: &Qmp,
    needed: bool,
    work: impl AsyncFnOnce() -> Result<(), E>,
    [refused, still_stopped]: [fn(QmpError) -> E; 2],
) -> Result<Duration, E> {
    if !needed {
        work().await?;
        return Ok(Duration::ZERO);
    }
    let began = Instant::now();
    let done = match qmp.execute("stop", json!({}), REOPEN_TIMEOUT).await {
        Ok(_) => work().await,
        Err(error) => Err(refused(error)),
    };
    // Also when the result of the stop is unknown.
    let resumed = qmp.execute("cont", json!({}), REOPEN_TIMEOUT).await;
    resumed.map_err(still_stopped)?;
    done.map(|()| began.elapsed())
}

async fn runs(qmp: &Qmp) -> Result<bool, QmpError> {
    let command = "query-status";
    let status = qmp.query(command).await?;
    status["running"].as_bool().ok_or_else(|| QmpError::Answer {
        command: command.to_owned(),
        why: "it does not say whether the guest runs".to_owned(),
    })
}

fn front_options(nodes: &DiskNodes, front: &Front) -> Value {
    let mut options = json!({
        "driver": "nbd", "node-name": front.node, "export": front.export,
        "server": {"type": "unix", "path": front.socket.to_string_lossy()},
        "reconnect-delay": RECONNECT_SECONDS,
    });
    for (key, value) in nodes.kept() {
        options[key] = value.clone();
    }
    options
}

/// Opens a second node of the file and deletes it, to find out beforehand whether QEMU can still
/// open the file.
async fn try_file(
    qmp: &Qmp,
    nodes: &DiskNodes,
    front: &Front,
    graph: &Graph,
) -> Result<(), QmpError> {
    let name = format!("{}-trial", front.node);
    if graph.has(&name) {
        delete(qmp, &name).await?;
    }
    let mut file = nodes.file.clone();
    file.insert("node-name".to_owned(), name.as_str().into());
    add(qmp, file.into()).await?;
    delete(qmp, &name).await
}

/// Creates the node of a file, replacing an existing one: QEMU remembers the file's length at the
/// time of opening, and would read zeros beyond it.
async fn make_file(qmp: &Qmp, nodes: &DiskNodes, graph: &Graph) -> Result<(), RemoveError> {
    // It has no parents, so the disk is unaffected by the results of these two.
    if graph.has(&nodes.file_name) {
        let deleted = delete(qmp, &nodes.file_name).await;
        deleted.map_err(RemoveError::Refused)?;
    }
    let added = add(qmp, nodes.file.clone().into()).await;
    added.map_err(RemoveError::Refused)
}

/// Exchanges the node below a disk.
async fn put_below(qmp: &Qmp, nodes: &DiskNodes, node: &str, graph: &Graph) -> Result<(), Change> {
    let exchanged = match &nodes.above {
        Above::Format(name, options) => {
            let options = reopened(name, options, node, graph);
            reopen(qmp, options.into()).await.map(|()| Value::Null)
        }
        Above::Node(name) => return held::put_below(qmp, name, node).await,
        Above::Device(path) => {
            let drive = json!({"path": path, "property": "drive", "value": node});
            qmp.execute("qom-set", drive, REOPEN_TIMEOUT).await
        }
    };
    exchanged.map(|_| ()).map_err(Change::from)
}

/// Returns the options of the wrapper: a format node for a device without one, inserted together
/// with the disk export. Nodes that other clients put on it can then be given the file, which QEMU
/// allows for a format node only.
fn wrapper_options(nodes: &DiskNodes, wrapper: &str, file: &str) -> Value {
    let mut options = json!({"driver": "raw", "node-name": wrapper, "file": file});
    for (key, value) in nodes.kept().filter(|(key, _)| *key != "detect-zeroes") {
        options[key] = value.clone();
    }
    options
}

async fn reopen(qmp: &Qmp, options: Value) -> Result<(), QmpError> {
    let options = json!({"options": [options]});
    let reopened = qmp.execute("blockdev-reopen", options, REOPEN_TIMEOUT);
    reopened.await.map(|_| ())
}

async fn add(qmp: &Qmp, options: Value) -> Result<(), QmpError> {
    let added = qmp.execute("blockdev-add", options, COMMAND_TIMEOUT);
    added.await.map(|_| ())
}

/// Returns the disks to QEMU's main thread. Disks of a stopped guest are there; a node that was
/// taken out while the guest ran is still with the I/O thread. QEMU 7.2 aborts when it has to bring
/// the two together.
async fn give_to_main_thread(qmp: &Qmp, node: &str) -> Result<(), QmpError> {
    let main = json!({"node-name": node, "iothread": null});
    let given = qmp.execute("x-blockdev-set-iothread", main, COMMAND_TIMEOUT);
    given.await.map(|_| ())
}

async fn delete(qmp: &Qmp, node: &str) -> Result<(), QmpError> {
    let deleted = qmp.execute("blockdev-del", json!({"node-name": node}), COMMAND_TIMEOUT);
    deleted.await.map(|_| ())
}

/// Activates a file's node: after a migration QEMU 10.0 leaves it inactive if it was not below its
/// disk when the guest began to run.
async fn activate(qmp: &Qmp, nodes: &DiskNodes, front: &Front) -> Result<(), QmpError> {
    let known = Known::ask(qmp).await?;
    // A device has no such state, but the node on it has.
    let above = match &nodes.above {
        Above::Format(name, _) | Above::Node(name) => name,
        Above::Device(_) => &nodes.standing(front),
    };
    if known.is_active(above) == Some(true) && known.is_active(&nodes.file_name) == Some(false) {
        let file = json!({"node-name": nodes.file_name, "active": true});
        let activated = qmp.execute("blockdev-set-active", file, COMMAND_TIMEOUT);
        activated.await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_front_takes_the_options_of_the_file_that_it_stands_for() {
        let cache = json!({"direct": true, "no-flush": false});
        let file = json!({"node-name": "f", "driver": "file", "discard": "unmap", "cache": cache,
            "locking": "on", "filename": "/x"});
        let file = file.as_object().unwrap().clone();
        let nodes = DiskNodes::direct("/machine/vda".to_owned(), file).unwrap();
        let front = Front {
            node: "n".to_owned(),
            socket: "/run/s".into(),
            export: "e".to_owned(),
        };
        let expected = json!({"driver": "nbd", "node-name": "n", "export": "e",
            "server": {"type": "unix", "path": "/run/s"}, "reconnect-delay": 3600,
            "discard": "unmap", "cache": cache});
        assert_eq!(front_options(&nodes, &front), expected);
    }
}
