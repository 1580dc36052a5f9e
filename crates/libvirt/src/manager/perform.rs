//! Makes a domain's QEMU migrate: libvirt does, and tells when it is done.

use super::{FLAGS, Libvirt, POLL};
use crate::connection::{Connection, LibvirtError};
use crate::domain::{DomainState, PausedFor};
use crate::migration::{Cookie, Outcome};
use crate::sockets;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use longhaul_hypervisor::memory::{Continuation, Migrator, OutgoingError, SourceError};
use longhaul_hypervisor::qmp::Qmp;
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::sync::Mutex;
use tokio::task::{JoinHandle, spawn_blocking};

/// The time limit for QEMU to begin its stream.
const BEGIN_TIMEOUT: Duration = Duration::from_secs(30);
/// The time limit for libvirt to say that a stream has ended.
const END_TIMEOUT: Duration = Duration::from_secs(60);
/// The time limit for a guest to run again.
const RESUME_TIMEOUT: Duration = Duration::from_secs(10);

type Performing = JoinHandle<Result<Cookie, LibvirtError>>;

/// Makes one domain migrate.
#[derive(Debug)]
pub(super) struct Performer {
    manager: Libvirt,
    connection: Connection,
    name: String,
    /// What the destination's daemon has for this one. The daemon of libvirt 9.0 dies without it.
    prepared: Cookie,
    performing: Mutex<Option<Performing>>,
    /// Whether an earlier stream was refused: its job has ended.
    again: std::sync::atomic::AtomicBool,
}

impl Performer {
    pub(super) fn new(
        manager: &Libvirt,
        connection: Connection,
        (name, prepared): (&str, Vec<u8>),
    ) -> Self {
        Self {
            manager: manager.clone(),
            connection,
            name: name.to_owned(),
            prepared: Cookie(prepared),
            performing: Mutex::default(),
            again: false.into(),
        }
    }

    /// Waits until libvirt has said that all of the stream was read, and returns what it has for
    /// the destination.
    pub(super) async fn ended(&self) -> Result<Cookie, String> {
        let performing = self.performing.lock().await.take();
        let performing = performing.ok_or("it does not migrate")?;
        match tokio::time::timeout(END_TIMEOUT, performing).await {
            Ok(Ok(ended)) => ended.map_err(|error| error.to_string()),
            Ok(Err(error)) => Err(format!("a part of the agent broke: {error}")),
            Err(_) => Err(format!(
                "libvirt has not ended the migration within {} s",
                END_TIMEOUT.as_secs()
            )),
        }
    }

    async fn begin(&self, qmp: &Qmp, path: &Path) -> Result<(), String> {
        use std::sync::atomic::Ordering;
        let (connection, name) = (self.connection.clone(), self.name.clone());
        // The daemon connects, and may have mounts of its own.
        let place = sockets::ours(&connection, &name);
        let path = path
            .strip_prefix(&place.folder)
            .map(|end| place.seen.join(end));
        let path = path.map_err(|_| "its socket is in another folder")?;
        let uri = format!("unix://{}", path.display());
        let again = self.again.swap(true, Ordering::Relaxed);
        let prepared = self.prepared.clone();
        let performing = spawn_blocking(move || {
            let no_domain = || LibvirtError::Closed {
                path: connection.path().to_owned(),
                why: "the domain is gone".to_owned(),
                sent: false,
            };
            let domain = connection.domain(&name)?.ok_or_else(no_domain)?;
            if again {
                // The destination waits with what the first one told it.
                connection.begin(&domain, FLAGS)?;
            }
            connection.perform(&domain, &prepared, &uri, FLAGS)
        });
        // Whatever happens from here on, `go_on` waits for its end.
        let mut kept = self.performing.lock().await;
        let performing = kept.insert(performing);
        let start = Instant::now();
        while start.elapsed() < BEGIN_TIMEOUT {
            if performing.is_finished() {
                let ended = performing.await;
                *kept = None;
                return match ended {
                    Ok(Ok(_)) => Err("it ended at once".to_owned()),
                    Ok(Err(error)) => Err(error.to_string()),
                    Err(error) => Err(format!("a part of the agent broke: {error}")),
                };
            }
            let status = qmp.query("query-migrate").await;
            let status = status.map_err(|error| error.to_string())?;
            if matches!(status["status"].as_str(), Some("setup" | "active")) {
                return Ok(());
            }
            tokio::time::sleep(POLL).await;
        }
        Err(format!(
            "it has not begun within {} s",
            BEGIN_TIMEOUT.as_secs()
        ))
    }

    /// Ends libvirt's migration, and lets the guest continue.
    async fn go_on(&self, how: Continuation) -> Result<(), String> {
        // The socket is closed, which ends it.
        if self.performing.lock().await.is_some()
            && let Err(error) = self.ended().await
        {
            tracing::debug!(guest = self.name, error, "libvirt's migration has ended");
        }
        let (leased, name) = (self.connection.clone(), self.name.clone());
        let manager = self.manager.clone();
        let resumed = spawn_blocking(move || {
            let connection = manager.connection_of(Some(leased))?;
            let Some(domain) = connection.domain(&name)? else {
                return Ok(None);
            };
            // Where the stream was refused, there is no job any more.
            let _ = connection.confirm(&domain, &Cookie::default(), Outcome::Cancelled, FLAGS);
            if how == Continuation::Stopped {
                return connection.state(&domain).map(Some);
            }
            let start = Instant::now();
            loop {
                let state = connection.state(&domain)?;
                let paused = match state {
                    DomainState::Paused(PausedFor::Migration) => true,
                    DomainState::Paused(PausedFor::User) => how == Continuation::Running,
                    _ => false,
                };
                if !paused || start.elapsed() > RESUME_TIMEOUT {
                    return Ok(Some(state));
                }
                match connection.resume(&domain) {
                    // A daemon that was just started may be at work on it.
                    Err(error) if start.elapsed() > RESUME_TIMEOUT => return Err(error),
                    Ok(()) | Err(_) => std::thread::sleep(POLL),
                }
            }
        });
        match resumed.await {
            Ok(Ok(Some(DomainState::Paused(PausedFor::Migration)))) => {
                Err("libvirt keeps it paused".to_owned())
            }
            Ok(Ok(Some(_))) => Ok(()),
            Ok(Ok(None)) => Err("libvirt does not have it any more".to_owned()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(error) => Err(format!("a part of the agent broke: {error}")),
        }
    }
}

impl Migrator for Performer {
    fn sets_up(&self) -> bool {
        true
    }

    fn migrate<'a>(
        &'a self,
        qmp: &'a Qmp,
        path: &'a Path,
    ) -> BoxFuture<'a, Result<(), OutgoingError>> {
        async move {
            let begun = self.begin(qmp, path).await;
            begun
                .map_err(|why| OutgoingError::Failed(format!("libvirt does not migrate it: {why}")))
        }
        .boxed()
    }

    fn connects(&self, _: i32, _: i32) -> bool {
        // libvirt's daemon connects, and gives QEMU the connection. Only root can enter the folder.
        true
    }

    fn resume<'a>(
        &'a self,
        _: &'a Qmp,
        how: Continuation,
    ) -> BoxFuture<'a, Result<(), SourceError>> {
        async move { self.go_on(how).await.map_err(SourceError::DoesNotRun) }.boxed()
    }
}
