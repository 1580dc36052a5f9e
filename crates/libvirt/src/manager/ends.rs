//! How the managers' parts of a move end, also where the daemon dies meanwhile and is started
//! again.

use super::{FLAGS, Handoff, Libvirt, POLL, blocking, lock, nobody};
use crate::connection::{Connection, LibvirtError};
use crate::domain::{DomainState, PausedFor, Xml};
use crate::migration::{Cookie as LibvirtCookie, Outcome};
use crate::notes::{Note, Role};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The time limit for a daemon that is being started again.
const RESTART_TIMEOUT: Duration = Duration::from_secs(30);
/// The time limit for a domain to be what it was told to be.
pub(super) const END_TIMEOUT: Duration = Duration::from_secs(15);
/// The interval between attempts to end what a move has left, and the longest one.
const SETTLE_INTERVALS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

impl Libvirt {
    /// Connects, also to a daemon that is being started again.
    pub(super) fn connect_again(&self) -> Result<Connection, LibvirtError> {
        let start = Instant::now();
        loop {
            let connected = self.connect().and_then(|it| it.ok_or_else(nobody));
            if connected.is_ok() || start.elapsed() > RESTART_TIMEOUT {
                return connected;
            }
            thread::sleep(POLL);
        }
    }

    /// Returns the connection of a guest's lease, or another one where its daemon has ended it.
    pub(super) fn connection_of(
        &self,
        leased: Option<Connection>,
    ) -> Result<Connection, LibvirtError> {
        match leased.filter(|connection| !connection.is_closed()) {
            Some(connection) => Ok(connection),
            None => self.connect_again(),
        }
    }

    /// Ends a departed guest's QEMU here, and its definition.
    pub(super) async fn end_departed(&self, name: &str) -> Result<(), String> {
        if let Some(connection) = self.of_lease(name) {
            let called = name.to_owned();
            let confirmed = blocking(move || {
                let Some(domain) = connection.domain(&called)? else {
                    return Ok(());
                };
                connection.confirm(&domain, &LibvirtCookie::default(), Outcome::Moved, FLAGS)
            });
            match confirmed.await {
                Ok(()) => return Ok(()),
                // Its daemon was restarted, and has forgotten the job.
                Err(error) => tracing::info!(guest = name, error, "ending it by its name"),
            }
        }
        let uuid = self.notes.read(name).map_err(|error| error.to_string())?;
        let Some(uuid) = uuid.map(|note| note.uuid) else {
            return Ok(());
        };
        let (manager, called) = (self.clone(), name.to_owned());
        blocking(move || manager.end_by_name(&called, &uuid)).await
    }

    /// Ends a domain and its definition. A daemon that was just started may end it by itself
    /// meanwhile.
    fn end_by_name(&self, name: &str, uuid: &str) -> Result<(), LibvirtError> {
        let connection = self.connect_again()?;
        let start = Instant::now();
        loop {
            let domain = connection.domain(name)?;
            let Some(domain) = domain.filter(|it| it.uuid_text() == uuid) else {
                return Ok(());
            };
            let ended = match domain.id {
                Some(_) => connection.destroy(&domain),
                None => connection.undefine(&domain),
            };
            match ended {
                Err(error) if start.elapsed() > END_TIMEOUT => return Err(error),
                Ok(()) | Err(_) => thread::sleep(POLL),
            }
        }
    }

    /// Defines an arrived domain that was defined at the source, with the paths of this host. Where
    /// its memory follows, libvirt does not before all of it is there.
    pub(super) async fn define(&self, name: &str) -> Result<(), String> {
        let note = self.notes.read(name).map_err(|error| error.to_string())?;
        let Some(note) = note.filter(|note| note.definition.is_some() || note.follows) else {
            // It was transient, and is here.
            return Ok(());
        };
        let (manager, leased) = (self.clone(), self.of_lease(name));
        let called = name.to_owned();
        let defined = blocking(move || {
            let connection = manager.connection_of(leased)?;
            let Some(definition) = note.definition else {
                return manager.wait_for_memory(&connection, &called);
            };
            let domain = connection.define(&definition.xml)?;
            match definition.autostarts {
                true => connection.set_autostart(&domain, true),
                false => Ok(()),
            }
        });
        defined.await?;
        let noted = self.notes.change(name, |note| {
            note.definition = None;
            note.follows = false;
        });
        noted.map_err(|error| error.to_string())
    }

    /// Waits until libvirt has ended the post-copy of a domain that nobody has defined.
    fn wait_for_memory(&self, connection: &Connection, name: &str) -> Result<(), LibvirtError> {
        while let Some(domain) = connection.domain(name)?
            && connection.state(&domain)? == DomainState::Postcopy
        {
            thread::sleep(SETTLE_INTERVALS[0]);
        }
        Ok(())
    }

    /// Ends the QEMU of a guest that does not come.
    pub(super) fn end_arriving(
        &self,
        connection: Option<Connection>,
        name: &str,
        uuid: &str,
    ) -> Result<(), LibvirtError> {
        if let Some(connection) = connection
            && connection.finish_cancelled(name, FLAGS).is_ok()
        {
            return Ok(());
        }
        let connection = self.connect_again()?;
        let domain = connection.domain(name)?;
        let domain = domain.filter(|it| it.uuid_text() == uuid && it.id.is_some());
        match domain {
            Some(domain) => match connection.destroy(&domain) {
                // The daemon has ended it meanwhile.
                Err(LibvirtError::Refused(_)) => Ok(()),
                ended => ended,
            },
            None => Ok(()),
        }
    }

    /// Lets a guest stay that was to depart.
    pub(super) fn stay(
        &self,
        leased: Option<Connection>,
        name: &str,
        resumes: bool,
    ) -> Result<(), LibvirtError> {
        let connection = self.connection_of(leased)?;
        let Some(domain) = connection.domain(name)? else {
            return Ok(());
        };
        let cookie = LibvirtCookie::default();
        // There is no job where a part of the move, or the daemon's death, has ended it.
        let _ = connection.confirm(&domain, &cookie, Outcome::Cancelled, FLAGS);
        self.restore_autostart(&connection, name)?;
        let start = Instant::now();
        loop {
            let state = connection.state(&domain)?;
            let is_held = matches!(
                state,
                DomainState::Paused(PausedFor::Migration | PausedFor::User)
            );
            if !is_held || !resumes {
                return Ok(());
            }
            match connection.resume(&domain) {
                // A daemon that was just started may be at work on it.
                Err(error) if start.elapsed() > END_TIMEOUT => return Err(error),
                Ok(()) | Err(_) => thread::sleep(POLL),
            }
        }
    }

    /// Begins the migration of a domain. Meanwhile its host does not start it by itself: a host
    /// that fails after the guest has left would start a second copy. `None` where there is none.
    pub(super) fn begin_departure(
        &self,
        connection: &Connection,
        name: &str,
        generation: u64,
    ) -> Result<Option<Handoff>, LibvirtError> {
        let _departing = lock(&self.shared.departing);
        let Some(domain) = connection.domain(name)? else {
            return Ok(None);
        };
        let is_defined = connection.is_persistent(&domain)?;
        let before = self.notes.read(name).map_err(LibvirtError::note)?;
        let was_off = before.is_some_and(|note| note.autostart_off.is_some());
        let autostarts = was_off || is_defined && connection.autostarts(&domain)?;
        let note = Note {
            uuid: domain.uuid_text(),
            role: Role::Departs,
            generation,
            sender: None,
            stops: false,
            autostart_off: autostarts.then(boot),
            began_ns: now_ns(),
            follows: false,
            definition: None,
        };
        self.notes.write(name, &note).map_err(LibvirtError::note)?;
        if autostarts {
            // It waits for the end of a migration.
            connection.set_autostart(&domain, false)?;
        }
        Ok(Some(Handoff {
            defined: match is_defined {
                true => Some(connection.xml(&domain, Xml::Defined)?),
                false => None,
            },
            autostarts,
            begun: connection.begin(&domain, FLAGS)?,
        }))
    }

    /// Lets the host start a domain by itself again, since it does not leave. Where the host was
    /// started again meanwhile, it is started now.
    pub(super) fn restore_autostart(
        &self,
        connection: &Connection,
        name: &str,
    ) -> Result<(), LibvirtError> {
        let note = self.notes.read(name).map_err(LibvirtError::note)?;
        let Some(began) = note.and_then(|note| note.autostart_off) else {
            return Ok(());
        };
        if let Some(domain) = connection.domain(name)? {
            connection.set_autostart(&domain, true)?;
            if domain.id.is_none() && began != boot() {
                tracing::info!(guest = name, "started, as this host would have started it");
                connection.start(&domain)?;
            }
        }
        let noted = self.notes.change(name, |note| note.autostart_off = None);
        noted.map_err(LibvirtError::note)
    }

    /// Ends what a move has left undone of a guest. Continues until that is done, since a daemon
    /// may be away for long.
    pub(super) fn settle_one(&self, name: &str) {
        // Most guests have no note, and most notes nothing to do.
        let note = match self.notes.read(name) {
            Ok(note) => note.filter(Note::is_unsettled),
            Err(error) => {
                return tracing::error!(guest = name, %error, "the note about it cannot be read");
            }
        };
        let Some(note) = note else {
            return;
        };
        if !lock(&self.shared.settling).insert(name.to_owned()) {
            return;
        }
        let (manager, name) = (self.clone(), name.to_owned());
        tokio::spawn(async move {
            let [mut interval, longest] = SETTLE_INTERVALS;
            while let Err(error) = manager.settle_now(&name, note.began_ns).await {
                tracing::error!(guest = name, error, "what its move left is not ended yet");
                tokio::time::sleep(interval).await;
                interval = (interval * 2).min(longest);
            }
            lock(&manager.shared.settling).remove(&name);
        });
    }

    /// Undoes a departure that came to nothing, unless another one has begun.
    fn undo_departure(&self, name: &str, began_ns: u64) -> Result<(), LibvirtError> {
        let _departing = lock(&self.shared.departing);
        let note = self.notes.read(name).map_err(LibvirtError::note)?;
        if !note.is_some_and(|note| note.role == Role::Departs && note.began_ns == began_ns) {
            return Ok(());
        }
        self.restore_autostart(&self.connect_again()?, name)?;
        self.notes.forget(name).map_err(LibvirtError::note)
    }

    async fn settle_now(&self, name: &str, began_ns: u64) -> Result<(), String> {
        let note = self.notes.read(name).map_err(|error| error.to_string())?;
        let Some(note) = note else {
            return Ok(());
        };
        match note.role {
            Role::Left => {
                self.end_departed(name).await?;
                self.notes.forget(name).map_err(|error| error.to_string())
            }
            Role::Departs => {
                let (manager, called) = (self.clone(), name.to_owned());
                blocking(move || manager.undo_departure(&called, began_ns)).await
            }
            Role::Here if note.definition.is_some() => self.define(name).await,
            _ => Ok(()),
        }
    }
}

/// Returns the id of this boot of the host.
fn boot() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    id.unwrap_or_default().trim().to_owned()
}

/// Returns the time since the Unix epoch, by which moves of a guest are told apart.
fn now_ns() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_nanos() as u64)
}
