//! Manages the guests that Longhaul launched or attached to, by their folders.

use crate::capabilities::Prober;
use crate::config::HostConfig;
use crate::folder::GuestFolder;
use crate::guest::{self, RecordedGuest, StopError};
use crate::launch::{Launch, Role};
use crate::manager::{
    AbortError, Commit, CommitError, Cookie, Departure, Found, Guest, GuestManager, IncomingGuest,
    IncomingSocket, LaunchIncomingError, Launched, Lease, ManagerError, Stays,
};
use crate::memory::{self, Continuation, Settings};
use crate::qmp::{COMMAND_TIMEOUT, Qmp, QmpError};
use crate::starter::Starter;
use crate::tpm;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use longhaul_protocol::HostId;
use longhaul_protocol::guest::{GuestDescription, Managed};
use longhaul_protocol::message::{Check, Verdict};
use serde_json::json;
use std::fmt::Display;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Longhaul's own launcher as a manager of guests.
///
/// The lease of a guest is the connection to its QEMU's control socket, which serves one client at
/// a time.
#[derive(Debug, Clone)]
pub struct Launcher {
    config: Arc<HostConfig>,
    prober: Prober,
}

impl Launcher {
    /// Manages the guests of the configuration's state folder.
    pub fn new(config: Arc<HostConfig>, prober: Prober) -> Self {
        Self { config, prober }
    }

    fn folder(&self, guest: &Guest) -> io::Result<GuestFolder> {
        GuestFolder::new(&self.config.state, guest.name()).map_err(io::Error::other)
    }

    /// Returns what the folder of a guest shows, if there is one. Any text may be given as a name.
    fn look(&self, name: &str) -> io::Result<Option<guest::Found>> {
        let mut folders = GuestFolder::all(&self.config.state)?.into_iter();
        Ok(folders
            .find(|folder| folder.name() == name)
            .map(guest::find))
    }

    async fn connect(&self, guest: &Guest, within: Duration) -> Result<Lease, ManagerError> {
        let folder = self.folder(guest).map_err(failed)?;
        let attached = match guest.is_attached() {
            true => folder.record().map_err(failed)?.attached,
            false => None,
        };
        let socket = attached.unwrap_or_else(|| folder.qmp());
        let qmp = Qmp::connect(&socket, within).await;
        Ok(Lease::from(qmp.map_err(failed)?))
    }

    async fn launch(self, incoming: IncomingGuest) -> Result<Launched, LaunchIncomingError> {
        let unsuitable = |error: &dyn Display| LaunchIncomingError::Unsuitable(error.to_string());
        let IncomingGuest {
            description,
            generation,
            bases,
            sizes,
            sender,
            managed,
        } = incoming;
        if let Some(Managed { by, .. }) = managed {
            return Err(unsuitable(&format!("the guest is one of {by}")));
        }
        let capabilities = self.prober.capabilities().await;
        let capabilities = capabilities.map_err(|error| unsuitable(&error))?;
        let machine = &description.machine;
        let emulator = capabilities
            .emulator_for(machine)
            .ok_or_else(|| unsuitable(&format!("no emulator here builds {machine}")))?;
        let launch = Launch {
            description: &description,
            role: Role::Destination,
            emulator,
            accelerator: capabilities.accelerator,
            generation,
            bases: &bases,
            sizes: &sizes,
        };
        let launched = launch.run(&self.config).await;
        let (recorded, qmp) = launched.map_err(not_launched)?;
        match Self::receive(&recorded, sender) {
            Ok((guest, socket)) => Ok(Launched {
                guest,
                lease: Lease::from(qmp),
                socket,
                listens: false,
                cookie: Cookie::default(),
            }),
            Err(error) => {
                if let Err(error) = recorded.stop(Some(&qmp)).await {
                    let guest = recorded.name();
                    tracing::error!(guest, %error, "something of it is left over");
                }
                Err(error)
            }
        }
    }

    fn receive(
        recorded: &RecordedGuest,
        sender: HostId,
    ) -> Result<(Guest, PathBuf), LaunchIncomingError> {
        let folder = recorded.folder();
        folder.note_sender(sender).map_err(|error| {
            not_launched(format!("cannot keep what is known of the guest: {error}"))
        })?;
        let socket = folder.socket("incoming").map_err(not_launched)?;
        Ok((recorded.handle(), socket))
    }

    /// Lets a guest run that a QEMU has just loaded.
    async fn run_loaded(lease: &Lease) -> Result<(), CommitError> {
        let answer = lease.qmp().execute("cont", json!({}), COMMAND_TIMEOUT);
        match answer.await {
            Ok(_) => Ok(()),
            Err(error @ QmpError::Refused { .. }) => Err(CommitError::Refused(error.to_string())),
            Err(error) => Err(CommitError::Unknown(error.to_string())),
        }
    }

    /// Lets a guest run whose QEMU an earlier agent may have told to run it.
    async fn run_found(&self, guest: &Guest) -> Result<(), CommitError> {
        let unknown = |error: &dyn Display| CommitError::Unknown(error.to_string());
        let lease = self.connect(guest, COMMAND_TIMEOUT).await;
        let lease = lease.map_err(|error| unknown(&error))?;
        let resumed = memory::resume(lease.qmp(), Continuation::Running).await;
        resumed.map_err(|error| unknown(&error))
    }

    fn note_generation(&self, name: &str, generation: u64) -> io::Result<()> {
        match self.look(name)? {
            Some(guest::Found::Running(mut guest) | guest::Found::Ended(mut guest)) => {
                guest.set_generation(generation)
            }
            Some(guest::Found::Damaged { why, .. }) => Err(io::Error::other(why)),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// Ends a guest's QEMU and removes everything that was created for it. Does nothing if there is
    /// nothing.
    pub async fn end(&self, name: &str, lease: Option<&Lease>) -> Result<(), StopError> {
        let failed = |what: &str| {
            let (guest, what) = (name.to_owned(), what.to_owned());
            move |source| StopError {
                guest,
                what,
                source,
            }
        };
        match self.look(name).map_err(failed("looking for it"))? {
            Some(guest::Found::Running(guest) | guest::Found::Ended(guest)) => {
                guest.stop(lease.map(Lease::qmp)).await
            }
            // An agent ended while it removed the folder, which is its last step.
            Some(guest::Found::Damaged { folder, why }) => {
                tracing::info!(guest = name, why, "removing the rest of its folder");
                if let Some(lease) = lease {
                    let ended = guest::quit(lease.qmp()).await.map_err(io::Error::other);
                    ended.map_err(failed("ending its process"))?;
                }
                folder
                    .remove()
                    .map_err(failed("removing the rest of its folder"))
            }
            None => Ok(()),
        }
    }

    /// Forgets a guest that another program started; its QEMU goes on unchanged.
    pub fn detach(&self, guest: &Guest) -> io::Result<()> {
        self.folder(guest)?.remove()
    }
}

fn failed(error: impl Display) -> ManagerError {
    ManagerError(error.to_string())
}

fn not_launched(error: impl Display) -> LaunchIncomingError {
    LaunchIncomingError::Failed(error.to_string())
}

impl From<guest::Found> for Found {
    fn from(found: guest::Found) -> Self {
        match found {
            guest::Found::Running(guest) => Self::Running(guest.handle()),
            guest::Found::Ended(guest) => Self::Ended(guest.handle()),
            guest::Found::Damaged { folder, why } => Self::Damaged {
                name: folder.name(),
                description: folder.description().ok().map(Box::new),
                sender: folder.sender(),
                why,
            },
        }
    }
}

impl GuestManager for Launcher {
    fn list(&self) -> io::Result<Vec<Found>> {
        let found = guest::find_all(&self.config.state)?;
        Ok(found.into_iter().map(Found::from).collect())
    }

    fn expect(&self, guest: &GuestDescription) -> Vec<Check> {
        if !tpm::has_one(guest) || tpm::program().is_some() {
            return Vec::new();
        }
        vec![Check {
            verdict: Verdict::Refused,
            text: format!("{}: {}", guest.name, tpm::missing()),
            hint: Some(format!("apt-get install {} there", tpm::PROGRAM)),
        }]
    }

    fn starter(&self, guest: &Guest) -> io::Result<Option<Starter>> {
        let own_socket = self.folder(guest)?.qmp();
        match guest.pid() {
            Some(pid) => Starter::of(pid, &own_socket),
            None => Ok(None),
        }
    }

    fn lease<'a>(
        &'a self,
        guest: &'a Guest,
        within: Duration,
    ) -> BoxFuture<'a, Result<Lease, ManagerError>> {
        self.connect(guest, within).boxed()
    }

    fn launch_incoming(
        &self,
        incoming: IncomingGuest,
    ) -> BoxFuture<'_, Result<Launched, LaunchIncomingError>> {
        let launching = tokio::spawn(self.clone().launch(incoming));
        let broke = |error| not_launched(format!("a part of the agent broke: {error}"));
        async move { launching.await.map_err(broke)? }.boxed()
    }

    fn incoming_socket(&self, guest: &Guest) -> io::Result<IncomingSocket> {
        let socket = self.folder(guest)?.socket("incoming");
        socket.map(IncomingSocket::from).map_err(io::Error::other)
    }

    fn commit<'a>(
        &'a self,
        guest: &'a Guest,
        lease: Option<&'a Lease>,
        commit: Commit,
    ) -> BoxFuture<'a, Result<(), CommitError>> {
        async move {
            let runs = match (commit.runs, lease) {
                (false, _) => Ok(()),
                (true, Some(lease)) => Self::run_loaded(lease).await,
                (true, None) => self.run_found(guest).await,
            };
            // A later agent repeats what has no answer, as long as this is not noted.
            if runs.is_err() && lease.is_some() {
                return runs;
            }
            // If this fails, a later agent notes it from the journal.
            if let Err(error) = self.note_generation(guest.name(), commit.generation) {
                tracing::error!(guest = guest.name(), %error, "cannot note the generation");
            }
            runs
        }
        .boxed()
    }

    fn abort_incoming<'a>(
        &'a self,
        guest: &'a str,
        lease: Option<&'a Lease>,
    ) -> BoxFuture<'a, Result<(), StopError>> {
        self.end(guest, lease).boxed()
    }

    fn depart<'a>(
        &'a self,
        guest: &'a Guest,
        lease: &'a Lease,
        _: Cookie,
    ) -> BoxFuture<'a, Result<Departure, ManagerError>> {
        async move {
            let folder = self.folder(guest).map_err(failed)?;
            let socket = folder.socket("outgoing").map_err(failed)?;
            let settings = Settings::look(lease.qmp()).await.map_err(failed)?;
            settings.keep(&folder.settings()).map_err(failed)?;
            if let Err(error) = folder.forget_stop() {
                tracing::error!(guest = guest.name(), %error, "cannot forget a stop");
            }
            Ok(Departure::from(socket))
        }
        .boxed()
    }

    fn note_stop(&self, guest: &Guest, stops: bool) -> io::Result<()> {
        let folder = self.folder(guest)?;
        match stops {
            true => folder.note_stop(),
            false => folder.forget_stop(),
        }
    }

    fn abort_outgoing<'a>(
        &'a self,
        guest: &'a Guest,
        lease: &'a Lease,
        stays: Stays,
    ) -> BoxFuture<'a, Result<(), AbortError>> {
        async move {
            let stopped = |error: &dyn Display| AbortError::Stopped(error.to_string());
            let folder = self.folder(guest);
            let folder = folder.map_err(|error| stopped(&error))?;
            if let Stays::Interrupted { ran, stopped: was } = stays {
                let how = Continuation::of(ran, was || folder.is_stop_noted());
                let resumed = memory::resume(lease.qmp(), how).await;
                resumed.map_err(|error| stopped(&error))?;
            }
            if let Err(error) = folder.forget_stop() {
                tracing::error!(guest = guest.name(), %error, "cannot forget a stop");
            }
            let restored = Settings::restore_kept(lease.qmp(), &folder.settings()).await;
            restored.map_err(|error| AbortError::Settings(error.to_string()))
        }
        .boxed()
    }

    fn confirm<'a>(
        &'a self,
        guest: &'a str,
        lease: Option<&'a Lease>,
    ) -> BoxFuture<'a, Result<(), StopError>> {
        async move {
            self.end(guest, lease).await?;
            let folder = GuestFolder::new(&self.config.state, guest).map_err(io::Error::other);
            let forgotten = folder.and_then(|folder| tpm::forget(&folder));
            forgotten.map_err(|source| StopError {
                guest: guest.to_owned(),
                what: "removing the state of its TPM".to_owned(),
                source,
            })
        }
        .boxed()
    }
}
