//! libvirt as a manager of guests: a move is a migration of libvirt's, whose phases the two agents
//! call, each at its own daemon.

mod arrival;
mod commit;
mod ends;
mod following;
mod handoff;
mod perform;

use crate::connection::{Connection, LibvirtError, SOCKETS as SOCKETS_OF_DAEMONS, WeakConnection};
use crate::domain::{Domain, DomainState, Xml};
use crate::migration::{Cookie as LibvirtCookie, Flags};
use crate::monitor;
use crate::notes::{Note, Notes, Role};
use crate::sockets;
use crate::xml::DomainXml;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
pub use handoff::Handoff;
use longhaul_hypervisor::config::HostConfig;
use longhaul_hypervisor::description;
use longhaul_hypervisor::guest::StopError;
use longhaul_hypervisor::manager::{
    AbortError, Commit, CommitError, Cookie, Departure, Facts, Found, Guest, GuestManager,
    IncomingGuest, IncomingSocket, LaunchIncomingError, Launched, Lease, ManagerError, Owner,
    Stays,
};
use longhaul_hypervisor::process::ProcessId;
use longhaul_hypervisor::qmp::Qmp;
use longhaul_hypervisor::starter::Starter;
use longhaul_protocol::guest::{GuestDescription, Managed, Manager};
use longhaul_protocol::message::Check;
use perform::Performer;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt::Display;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use tokio::task::spawn_blocking;

/// Every move: disks and their caches are Longhaul's affair.
const FLAGS: Flags = Flags::LIVE.with(Flags::UNSAFE);
/// The sockets of a domain's QEMU for its stream and for Longhaul's monitor.
const STREAM: &str = "stream";
const MONITOR: &str = "qmp";
/// This process's socket for the stream of a domain that departs.
const DEPARTURE: &str = "departure";
const LOGS: &str = "/var/log/libvirt/qemu";
/// The interval between looks at a state.
const POLL: Duration = Duration::from_millis(20);

/// The guests of libvirt on this host.
#[derive(Debug, Clone)]
pub struct Libvirt {
    config: Arc<HostConfig>,
    /// The daemon's socket, unless it is to be looked for.
    socket: Option<PathBuf>,
    notes: Notes,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// For questions.
    queries: Mutex<Option<Connection>>,
    /// Why it did not answer the last question.
    silent: Mutex<Option<String>>,
    /// The connections of leases, by the guests' names: the jobs of moves belong to them.
    leases: Mutex<HashMap<String, WeakConnection>>,
    /// Those that make a guest migrate, by the guests' names.
    performers: Mutex<HashMap<String, Weak<Performer>>>,
    /// The guests whose moves are over, and of which something is being ended.
    settling: Mutex<HashSet<String>>,
    /// Held while a departure begins, or is undone.
    departing: Mutex<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change is one step.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn failed(error: impl Display) -> ManagerError {
    ManagerError(error.to_string())
}

fn other(error: impl Display) -> io::Error {
    io::Error::other(error.to_string())
}

/// Runs calls of libvirt, which block.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, LibvirtError> + Send + 'static,
) -> Result<T, String> {
    match spawn_blocking(work).await {
        Ok(done) => done.map_err(|error| error.to_string()),
        Err(error) => Err(format!("a part of the agent broke: {error}")),
    }
}

impl Libvirt {
    /// Manages the guests of the daemon at a socket, or of the one that is found. The configuration
    /// names what they use on this host.
    pub fn new(config: Arc<HostConfig>, socket: Option<PathBuf>) -> Self {
        Self {
            notes: Notes::new(&config.state),
            config,
            socket,
            shared: Arc::default(),
        }
    }

    fn connect(&self) -> Result<Option<Connection>, LibvirtError> {
        match &self.socket {
            Some(socket) => Connection::open(socket).map(Some),
            None => Connection::find(),
        }
    }

    /// Returns a connection for questions; `None` where there is no libvirt.
    fn queries(&self) -> Result<Option<Connection>, LibvirtError> {
        let mut queries = lock(&self.shared.queries);
        if let Some(connection) = queries.as_ref().filter(|it| !it.is_closed()) {
            return Ok(Some(connection.clone()));
        }
        *queries = self.connect()?;
        Ok(queries.clone())
    }

    /// Returns the connection of a guest's lease.
    fn of_lease(&self, name: &str) -> Option<Connection> {
        lock(&self.shared.leases).get(name)?.upgrade()
    }

    fn performer(&self, name: &str) -> Option<Arc<Performer>> {
        lock(&self.shared.performers).get(name)?.upgrade()
    }

    /// Returns what a domain is as a guest.
    fn look(&self, connection: &Connection, domain: &Domain) -> Result<Found, LibvirtError> {
        let name = domain.name.as_str();
        let xml = connection.xml(domain, Xml::Live)?;
        let note = self.notes.read(name).unwrap_or_default();
        let note = note.filter(|note| note.uuid == domain.uuid_text());
        let sender = note.as_ref().and_then(|note| note.sender);
        let place = sockets::ours(connection, name);
        let monitor = sockets::made_by_qemu(&place).theirs(MONITOR);
        let monitor = monitor.display().to_string();
        let described = DomainXml::read(&xml).and_then(|xml| {
            let guest = xml.description(&self.config)?;
            // A destination takes no more than this host would.
            xml.with_monitor(&guest, &self.config, &monitor)?;
            Ok(guest)
        });
        let described = described.map_err(|error| error.to_string());
        let snapshots = connection.snapshots(domain)?;
        let described = described.and_then(|guest| match snapshots {
            0 => Ok(guest),
            _ => Err(format!(
                "it has {snapshots} snapshots, and libvirt migrates no domain with any (hint: \
                 virsh snapshot-delete --metadata)"
            )),
        });
        let described = described.and_then(|guest| {
            let checked = description::check(&guest).map_err(|error| error.to_string());
            checked.map(|()| guest)
        });
        Ok(match described {
            Ok(description) => Found::Running(Guest::from(Facts {
                description,
                generation: note.map_or(0, |note| note.generation),
                process: self.process(connection, name).unwrap_or_default(),
                owner: Owner::Libvirt,
                paused: matches!(connection.state(domain)?, DomainState::Paused(_)),
                sender,
                log: Path::new(LOGS).join(format!("{name}.log")),
                channels: BTreeMap::new(),
                sockets: Some(place),
            })),
            Err(why) => Found::Foreign {
                name: name.to_owned(),
                by: Manager::Libvirt,
                why,
            },
        })
    }

    /// Returns the process of a domain's QEMU, which libvirt keeps in a file beside its socket.
    fn process(&self, connection: &Connection, name: &str) -> io::Result<Option<ProcessId>> {
        let folder = connection.path().parent().unwrap_or(Path::new("/"));
        let text = fs::read_to_string(folder.join("qemu").join(format!("{name}.pid")))?;
        ProcessId::of(text.trim().parse().map_err(other)?)
    }

    /// Opens a connection of its own for a guest, which is its lease.
    async fn open(&self, name: &str, within: Duration) -> Result<Lease, ManagerError> {
        let start = Instant::now();
        while self.of_lease(name).is_some() {
            if start.elapsed() > within {
                return Err(failed("another operation of this agent controls its QEMU"));
            }
            tokio::time::sleep(POLL).await;
        }
        let (manager, called) = (self.clone(), name.to_owned());
        let opened = blocking(move || {
            let Some(connection) = manager.connect()? else {
                return Ok(None);
            };
            let domain = connection.domain(&called)?;
            Ok(domain.map(|domain| (connection, domain)))
        });
        let Some((connection, domain)) = opened.await.map_err(failed)? else {
            return Err(failed(format!("libvirt has no domain {name}")));
        };
        let note = self.notes.read(name).map_err(failed)?;
        let qmp = match note.is_some_and(|note| note.follows) {
            true => {
                let sockets = sockets::made_by_qemu(&sockets::ours(&connection, name));
                let qmp = Qmp::connect(&sockets.ours(MONITOR), within).await;
                qmp.map_err(failed)?
            }
            false => {
                let qmp = monitor::open(&connection, &domain, within).await;
                qmp.map_err(failed)?
            }
        };
        Ok(self.lease_holding(&connection, name, qmp))
    }

    fn lease_holding(&self, connection: &Connection, name: &str, qmp: Qmp) -> Lease {
        let weak = connection.downgrade();
        lock(&self.shared.leases).insert(name.to_owned(), weak);
        Lease::holding(qmp, connection.clone())
    }

    async fn launch(self, incoming: IncomingGuest) -> Result<Launched, LaunchIncomingError> {
        let unsuitable = |error: &dyn Display| LaunchIncomingError::Unsuitable(error.to_string());
        let broken = |error: &dyn Display| LaunchIncomingError::Failed(error.to_string());
        let IncomingGuest {
            description,
            generation,
            sender,
            managed,
            ..
        } = incoming;
        let Some(Managed { cookie, .. }) = managed else {
            return Err(unsuitable(&"it is no guest of libvirt"));
        };
        let handoff = Handoff::unpack(&cookie).map_err(|error| unsuitable(&error))?;
        let name = description.name.clone();
        let left = self.notes.read(&name).map_err(|error| broken(&error))?;
        if left.is_some_and(|note| note.role == Role::Left) {
            return Err(unsuitable(&arrival::STILL_HERE));
        }
        let accepted = self.accept(&description, &handoff);
        let accepted = accepted.map_err(|error| unsuitable(&error))?;
        let (manager, called) = (self.clone(), name.clone());
        let opened = spawn_blocking(move || {
            let connection = manager.connect().map_err(|error| error.to_string())?;
            let connection = connection.ok_or("there is no libvirt here")?;
            let place = sockets::ours(&connection, &called);
            sockets::make_for_qemu(&connection, &place)?;
            Ok::<_, String>((connection, sockets::made_by_qemu(&place)))
        });
        let opened = opened.await.map_err(|error| broken(&error))?;
        let (connection, sockets) = opened.map_err(|error| broken(&error))?;
        let note = Note {
            uuid: accepted.uuid,
            role: Role::Arrives,
            generation,
            sender: Some(sender),
            stops: false,
            autostart_off: None,
            began_ns: 0,
            follows: false,
            definition: accepted.definition,
        };
        self.notes
            .write(&name, &note)
            .map_err(|error| broken(&error))?;
        let uri = format!("unix://{}", sockets.theirs(STREAM).display());
        let called = name.clone();
        let prepared = blocking(move || {
            let prepared = connection.prepare(&handoff.begun.cookie, &accepted.xml, &uri, FLAGS)?;
            let domain = connection.domain(&called)?;
            Ok(domain.map(|domain| (connection, domain, prepared)))
        });
        let launched = async {
            let prepared = prepared.await.map_err(|error| broken(&error))?;
            let (connection, domain, LibvirtCookie(cookie)) =
                prepared.ok_or_else(|| broken(&"libvirt does not have it any more"))?;
            let found = self.look(&connection, &domain);
            match found.map_err(|error| broken(&error))? {
                Found::Running(guest) => {
                    let qmp = Qmp::connect(&sockets.ours(MONITOR), monitor::TIMEOUT).await;
                    let qmp = qmp.map_err(|error| broken(&error))?;
                    let lease = self.lease_holding(&connection, &name, qmp);
                    Ok((guest, lease, Cookie(cookie)))
                }
                Found::Foreign { why, .. } => Err(unsuitable(&why)),
                Found::Ended(_) | Found::Damaged { .. } => Err(broken(&"its QEMU has ended")),
            }
        };
        match launched.await {
            Ok((guest, lease, cookie)) => {
                let socket = sockets.ours(STREAM);
                Ok(Launched {
                    guest,
                    lease,
                    socket,
                    listens: true,
                    cookie,
                })
            }
            Err(error) => {
                // The daemon ends its QEMU with the connection.
                self.forget(&name);
                Err(error)
            }
        }
    }

    fn forget(&self, name: &str) {
        if let Err(error) = self.notes.forget(name) {
            tracing::error!(guest = name, %error, "cannot forget a note about it");
        }
    }
}

/// The error where no daemon is found.
fn nobody() -> LibvirtError {
    LibvirtError::Connect {
        path: SOCKETS_OF_DAEMONS[0].into(),
        why: "there is no libvirt".to_owned(),
    }
}

fn stop_error(guest: &str, what: &str, error: impl Display) -> StopError {
    StopError {
        guest: guest.to_owned(),
        what: what.to_owned(),
        source: other(error),
    }
}

impl GuestManager for Libvirt {
    fn list(&self) -> io::Result<Vec<Found>> {
        // Longhaul's own guests do not depend on libvirt: where it does not answer, it has none.
        let asked = self.queries().and_then(|connection| match connection {
            Some(connection) => {
                let domains = connection.domains()?;
                Ok(Some((connection, domains)))
            }
            None => Ok(None),
        });
        let why = asked.as_ref().err().map(ToString::to_string);
        let before = std::mem::replace(&mut *lock(&self.shared.silent), why.clone());
        if let Some(why) = why.filter(|why| before.as_ref() != Some(why)) {
            tracing::warn!(why, "libvirt's guests are not known");
        }
        let Ok(Some((queries, domains))) = asked else {
            return Ok(Vec::new());
        };
        let mut found = Vec::new();
        for domain in domains.iter().filter(|domain| domain.id.is_some()) {
            match self.look(&queries, domain) {
                Ok(guest) => found.push(guest),
                // It has ended meanwhile.
                Err(error) if error.is_no_domain() => {}
                Err(error) => return Err(other(error)),
            }
        }
        Ok(found)
    }

    fn find(&self, name: &str) -> io::Result<Option<Guest>> {
        // Journals are closed by this answer: a daemon that is silent is an error, and no absence.
        let moves = self.notes.read(name)?.is_some();
        let connection = match self.queries() {
            Ok(Some(connection)) => connection,
            Ok(None) if moves => return Err(other("libvirt is not there, and has moved it")),
            Err(error) if moves => return Err(other(error)),
            Ok(None) | Err(_) => return Ok(None),
        };
        let domain = match connection.domain(name) {
            Ok(domain) => domain.filter(|domain| domain.id.is_some()),
            Err(error) if moves => return Err(other(error)),
            Err(_) => None,
        };
        let Some(domain) = domain else {
            return Ok(None);
        };
        match self.look(&connection, &domain) {
            Ok(Found::Running(guest)) => Ok(Some(guest)),
            Ok(_) => Ok(None),
            Err(error) if error.is_no_domain() => Ok(None),
            Err(error) => Err(other(error)),
        }
    }

    fn starter(&self, _: &Guest) -> io::Result<Option<Starter>> {
        // Its definition goes with it.
        Ok(None)
    }

    fn lease<'a>(
        &'a self,
        guest: &'a Guest,
        within: Duration,
    ) -> BoxFuture<'a, Result<Lease, ManagerError>> {
        self.open(guest.name(), within).boxed()
    }

    fn outlook(&self, guest: &Guest) -> io::Result<Cookie> {
        let handoff = Self::outlook(self, guest).map_err(other)?;
        let handoff = handoff.ok_or_else(|| other("libvirt does not have it any more"))?;
        Ok(handoff.pack())
    }

    fn obstacles(&self, guest: &GuestDescription, outlook: &Managed, follows: bool) -> Vec<Check> {
        let found = Self::obstacles(self, guest, &outlook.cookie, follows);
        found.into_iter().collect()
    }

    fn launch_incoming(
        &self,
        incoming: IncomingGuest,
    ) -> BoxFuture<'_, Result<Launched, LaunchIncomingError>> {
        let launching = tokio::spawn(self.clone().launch(incoming));
        let broke =
            |error| LaunchIncomingError::Failed(format!("a part of the agent broke: {error}"));
        async move { launching.await.map_err(broke)? }.boxed()
    }

    fn incoming_socket(&self, guest: &Guest) -> io::Result<IncomingSocket> {
        let place = guest.sockets().map(sockets::made_by_qemu);
        let place = place.ok_or_else(|| io::Error::other("it is no guest of libvirt"))?;
        Ok(IncomingSocket {
            ours: place.ours(STREAM),
            theirs: place.theirs(STREAM),
        })
    }

    fn commit<'a>(
        &'a self,
        guest: &'a Guest,
        lease: Option<&'a Lease>,
        commit: Commit,
    ) -> BoxFuture<'a, Result<(), CommitError>> {
        async move { self.commit_guest(guest.name(), lease, commit).await }.boxed()
    }

    fn has_never_run(&self, guest: &str) -> io::Result<bool> {
        // The daemon ends its QEMU with the connection of the agent that prepared it.
        let note = self.notes.read(guest)?;
        let waits = note.is_some_and(|note| note.role == Role::Arrives);
        Ok(waits && self.of_lease(guest).is_none())
    }

    fn abort_incoming<'a>(
        &'a self,
        guest: &'a str,
        _: Option<&'a Lease>,
    ) -> BoxFuture<'a, Result<(), StopError>> {
        async move {
            let failed = |error: String| stop_error(guest, "ending its QEMU", error);
            let note = self.notes.read(guest);
            let note = note.map_err(|error| failed(error.to_string()))?;
            let arrives = |note: &Note| matches!(note.role, Role::Arrives | Role::Commits);
            let Some(note) = note.filter(arrives) else {
                return Ok(());
            };
            let (manager, called) = (self.clone(), guest.to_owned());
            let connection = self.of_lease(guest);
            let ended = blocking(move || manager.end_arriving(connection, &called, &note.uuid));
            ended.await.map_err(failed)?;
            self.forget(guest);
            Ok(())
        }
        .boxed()
    }

    fn begin<'a>(
        &'a self,
        guest: &'a Guest,
        _: &'a Lease,
    ) -> BoxFuture<'a, Result<Cookie, ManagerError>> {
        async move {
            let name = guest.name().to_owned();
            let connection = self.of_lease(&name);
            let connection = connection.ok_or_else(|| failed("its lease has ended"))?;
            let (manager, generation) = (self.clone(), guest.generation());
            let begun = blocking(move || manager.begin_departure(&connection, &name, generation));
            let handoff = match begun.await {
                Ok(Some(handoff)) => Ok(handoff),
                Ok(None) => Err(failed("libvirt does not have it any more")),
                Err(error) => Err(failed(error)),
            };
            if handoff.is_err() {
                self.settle_one(guest.name());
            }
            Ok(handoff?.pack())
        }
        .boxed()
    }

    fn depart<'a>(
        &'a self,
        guest: &'a Guest,
        _: &'a Lease,
        Cookie(prepared): Cookie,
    ) -> BoxFuture<'a, Result<Departure, ManagerError>> {
        async move {
            let name = guest.name();
            let connection = self.of_lease(name);
            let connection = connection.ok_or_else(|| failed("its lease has ended"))?;
            let place = sockets::ours(&connection, name);
            place.make().map_err(failed)?;
            let socket = place.ours(DEPARTURE);
            let performer = Arc::new(Performer::new(self, connection, (name, prepared)));
            let weak = Arc::downgrade(&performer);
            lock(&self.shared.performers).insert(name.to_owned(), weak);
            Ok(Departure {
                socket,
                by: performer,
            })
        }
        .boxed()
    }

    fn departed<'a>(&'a self, guest: &'a Guest) -> BoxFuture<'a, Result<Cookie, ManagerError>> {
        async move {
            let performer = self.performer(guest.name());
            let performer = performer.ok_or_else(|| failed("it does not depart"))?;
            let LibvirtCookie(cookie) = performer.ended().await.map_err(failed)?;
            Ok(Cookie(cookie))
        }
        .boxed()
    }

    fn note_stop(&self, guest: &Guest, stops: bool) -> io::Result<()> {
        self.notes.change(guest.name(), |note| note.stops = stops)
    }

    fn abort_outgoing<'a>(
        &'a self,
        guest: &'a Guest,
        _: &'a Lease,
        stays: Stays,
    ) -> BoxFuture<'a, Result<(), AbortError>> {
        async move {
            let stopped = |error: String| AbortError::Stopped(error);
            let name = guest.name().to_owned();
            let leased = self.of_lease(&name);
            let note = self.notes.read(&name).unwrap_or_default();
            let resumes = match stays {
                Stays::Continued => false,
                Stays::Interrupted { ran, stopped } => {
                    ran && (stopped || note.is_some_and(|note| note.stops))
                }
            };
            let (manager, called) = (self.clone(), name.clone());
            let ended = blocking(move || manager.stay(leased, &called, resumes));
            ended.await.map_err(stopped)?;
            self.forget(&name);
            Ok(())
        }
        .boxed()
    }

    fn settle<'a>(&'a self, moving: &'a BTreeSet<String>) -> BoxFuture<'a, ()> {
        async move {
            match self.notes.names() {
                Ok(names) => {
                    let over = names.iter().filter(|name| !moving.contains(*name));
                    over.for_each(|name| self.settle_one(name));
                }
                Err(error) => tracing::error!(%error, "the notes about domains cannot be read"),
            }
        }
        .boxed()
    }

    fn settle_guest(&self, guest: &str) {
        self.settle_one(guest);
    }

    fn confirm<'a>(
        &'a self,
        guest: &'a str,
        _: Option<&'a Lease>,
    ) -> BoxFuture<'a, Result<(), StopError>> {
        async move {
            let failed = |error: String| stop_error(guest, "ending it", error);
            let note = self.notes.read(guest);
            let note = note.map_err(|error| failed(error.to_string()))?;
            if note.is_none_or(|note| !matches!(note.role, Role::Departs | Role::Left)) {
                return Ok(());
            }
            // From here on nothing of it may be started here.
            let noted = self.notes.change(guest, |note| note.role = Role::Left);
            noted.map_err(|error| failed(error.to_string()))?;
            if let Err(error) = self.end_departed(guest).await {
                self.settle_one(guest);
                return Err(failed(error));
            }
            self.forget(guest);
            Ok(())
        }
        .boxed()
    }
}
