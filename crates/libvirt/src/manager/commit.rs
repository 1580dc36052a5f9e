//! How an arrived guest becomes this host's: libvirt is told to run it.

use super::{FLAGS, Libvirt, POLL, lock};
use crate::connection::{Connection, LibvirtError};
use crate::domain::DomainState;
use crate::manager::ends::END_TIMEOUT;
use crate::migration::{Cookie as LibvirtCookie, Flags};
use crate::notes::Role;
use longhaul_hypervisor::manager::{Commit, CommitError, Cookie, Lease};
use longhaul_hypervisor::qmp::{Event, Qmp};
use std::thread;
use std::time::{Duration, Instant};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::task::{JoinError, JoinHandle, spawn_blocking};
use tokio::time::timeout;

/// QEMU's event when it lets its guest run.
const RESUME: &str = "RESUME";

/// The time for libvirt to refuse a guest that arrives paused and whose memory follows. libvirt 9.0
/// answers otherwise only when all of it is there, and no event of QEMU comes before.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(2);

type Finishing = JoinHandle<Result<(), CommitError>>;

/// Waits until libvirt has let a guest run whose memory follows. libvirt answers only when all of
/// it is there, so QEMU's own word is enough. `None` if the call goes on.
async fn finished_or_resumed(
    finishing: &mut Finishing,
    mut events: Receiver<Event>,
) -> Option<Result<Result<(), CommitError>, JoinError>> {
    let resumed = async {
        loop {
            match events.recv().await {
                Ok(event) if event.name == RESUME => return,
                Ok(_) | Err(RecvError::Lagged(_)) => {}
                // The call ends too, and says why.
                Err(RecvError::Closed) => std::future::pending().await,
            }
        }
    };
    tokio::select! {
        finished = finishing => Some(finished),
        () = resumed => None,
    }
}

impl Libvirt {
    /// Gives an arrived guest to this host, and defines it here as it was defined at its source.
    pub(super) async fn commit_guest(
        &self,
        name: &str,
        lease: Option<&Lease>,
        commit: Commit,
    ) -> Result<(), CommitError> {
        let Commit {
            generation,
            runs,
            follows,
            cookie: Cookie(cookie),
        } = commit;
        let connection = lease.and_then(|_| self.of_lease(name));
        let monitor = lease.map(|lease| (lease.qmp().clone(), lease.qmp().events()));
        let resumes = lease.filter(|_| runs && follows);
        let resumes = resumes.map(|lease| lease.qmp().events());
        let (manager, called) = (self.clone(), name.to_owned());
        let mut finishing = spawn_blocking(move || match connection {
            Some(connection) => manager.finish(&connection, &called, cookie, (runs, follows)),
            None => {
                let found = manager.run_found(&called, runs);
                found.map_err(|error| CommitError::Unknown(error.to_string()))
            }
        });
        let finished = match resumes {
            Some(events) => finished_or_resumed(&mut finishing, events).await,
            None if follows && lease.is_some() => {
                timeout(REFUSAL_TIMEOUT, &mut finishing).await.ok()
            }
            None => Some((&mut finishing).await),
        };
        let goes_on = finished.is_none();
        let finished = finished.unwrap_or(Ok(Ok(())));
        let broke = |error| CommitError::Unknown(format!("a part of the agent broke: {error}"));
        let committed = match (finished.map_err(broke)?, monitor) {
            (Err(CommitError::Unknown(why)), Some((qmp, events))) => {
                let became = self.what_became(name, (qmp.clone(), events), (why, runs));
                became.await.map_err(|error| (error, qmp.is_closed()))
            }
            (committed, _) => committed.map_err(|error| (error, false)),
        };
        // What fails from here on is not a part of the move.
        let is_here = || {
            let noted = self.notes.change(name, |note| {
                note.role = Role::Here;
                note.generation = generation;
            });
            if let Err(error) = noted {
                tracing::error!(guest = name, %error, "cannot note the generation");
            }
        };
        match committed {
            Ok(()) => is_here(),
            // It has run, and its QEMU has ended: from here it can be started again.
            Err((error @ CommitError::Unknown(_), true)) => {
                is_here();
                self.settle_one(name);
                return Err(error);
            }
            Err((error, _)) => return Err(error),
        }
        match (goes_on, follows) {
            (true, _) => self.finish_later(name, finishing),
            // Its source waits for it to run, and libvirt may be busy with it for a while.
            (false, true) => {
                let (manager, name) = (self.clone(), name.to_owned());
                tokio::spawn(async move { manager.define_now(&name).await });
            }
            (false, false) => self.define_now(name).await,
        }
        Ok(())
    }

    async fn define_now(&self, name: &str) {
        if let Err(error) = self.define(name).await {
            tracing::error!(guest = name, error, "it runs, and is not defined yet");
            self.settle_one(name);
        }
    }

    /// Waits for the end of a call that has let a guest run whose memory follows. libvirt takes no
    /// definition of it before.
    fn finish_later(&self, name: &str, finishing: Finishing) {
        // The connection is kept for the call, and controls QEMU no more.
        lock(&self.shared.leases).remove(name);
        let (manager, name) = (self.clone(), name.to_owned());
        tokio::spawn(async move {
            match finishing.await {
                Ok(Ok(())) => tracing::info!(guest = name, "libvirt has ended its post-copy"),
                Ok(Err(error)) => {
                    tracing::warn!(guest = name, %error, "its post-copy ends without libvirt");
                }
                Err(error) => tracing::error!(guest = name, %error, "a part of the agent broke"),
            }
            manager.define_now(&name).await;
        });
    }

    /// Gives an arrived guest to this host.
    fn finish(
        &self,
        connection: &Connection,
        name: &str,
        cookie: Vec<u8>,
        (runs, follows): (bool, bool),
    ) -> Result<(), CommitError> {
        // From here on only libvirt knows whether it has run.
        let noted = self.notes.change(name, |note| {
            note.role = Role::Commits;
            note.follows = follows;
        });
        noted.map_err(|error| CommitError::Refused(error.to_string()))?;
        let mut flags = FLAGS;
        for (set, flag) in [(!runs, Flags::PAUSED), (follows, Flags::POSTCOPY)] {
            if set {
                flags = flags.with(flag);
            }
        }
        let finished = connection.finish(name, &LibvirtCookie(cookie), flags);
        let error = match finished {
            Ok(_) => return Ok(()),
            Err(error) => error,
        };
        // A daemon that refuses has not let it run, and has ended its QEMU.
        let refuses = matches!(error, LibvirtError::Refused(_));
        let is_gone = match connection.domain(name) {
            Ok(domain) => refuses && domain.is_none_or(|domain| domain.id.is_none()),
            Err(_) => false,
        };
        match is_gone || error.was_not_sent() {
            true => Err(CommitError::Refused(error.to_string())),
            false => Err(CommitError::Unknown(error.to_string())),
        }
    }

    /// Finds out what became of a guest that its daemon was told to run, without an answer. QEMU
    /// says that it resumes before it does, to every monitor.
    async fn what_became(
        &self,
        name: &str,
        (qmp, mut events): (Qmp, Receiver<Event>),
        (why, runs): (String, bool),
    ) -> Result<(), CommitError> {
        let (manager, called) = (self.clone(), name.to_owned());
        let looked = spawn_blocking(move || {
            let connection = manager.connect_again()?;
            let start = Instant::now();
            loop {
                let domain = connection.domain(&called)?;
                let state = match domain.filter(|domain| domain.id.is_some()) {
                    Some(domain) => Some((connection.state(&domain)?, domain)),
                    None => None,
                };
                match state {
                    Some((DomainState::Running | DomainState::Postcopy, _)) => return Ok(true),
                    // A daemon that was just started would have ended one that it did not run.
                    Some((_, domain)) if start.elapsed() > END_TIMEOUT => {
                        return match runs {
                            true => connection.resume(&domain).map(|()| true),
                            false => Ok(true),
                        };
                    }
                    None if qmp.is_closed() => return Ok(false),
                    // libvirt has forgotten a QEMU that is there.
                    None if start.elapsed() > END_TIMEOUT => {
                        return Err(LibvirtError::Connect {
                            path: connection.path().to_owned(),
                            why: "the daemon does not know its QEMU, which still answers"
                                .to_owned(),
                        });
                    }
                    Some(_) | None => thread::sleep(POLL),
                }
            }
        });
        match looked.await {
            Ok(Ok(true)) => return Ok(()),
            Ok(Ok(false)) => {}
            Ok(Err(error)) => return Err(CommitError::Unknown(error.to_string())),
            Err(error) => {
                return Err(CommitError::Unknown(format!(
                    "a part of the agent broke: {error}"
                )));
            }
        }
        let mut may_have_run = false;
        loop {
            match events.try_recv() {
                Ok(event) => may_have_run |= event.name == RESUME,
                Err(TryRecvError::Lagged(_)) => may_have_run = true,
                Err(TryRecvError::Empty | TryRecvError::Closed) => break,
            }
        }
        match may_have_run {
            true => Err(CommitError::Unknown(why)),
            false => Err(CommitError::Refused(format!(
                "its QEMU has ended without letting it run: {why}"
            ))),
        }
    }

    /// Lets a guest run that an earlier agent may have committed.
    fn run_found(&self, name: &str, runs: bool) -> Result<(), LibvirtError> {
        let connection = self.connect_again()?;
        let Some(domain) = connection.domain(name)? else {
            return Ok(());
        };
        match connection.state(&domain)? {
            DomainState::Paused(_) if runs => connection.resume(&domain),
            _ => Ok(()),
        }
    }
}
