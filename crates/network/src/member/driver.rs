//! Owns the state machine of a member: one task that takes inputs and carries actions out.

use super::file::{Order, Stored, Writer};
use super::gossip::Peers;
use super::link::{self, Up};
use super::status::{LinkState, Status};
use super::{Acquired, Event, MemberError};
use bytes::Bytes;
use longhaul_overlay::seal::Suite;
use longhaul_protocol::wire::Message;
use longhaul_protocol::{Generation, HostId, StoreId};
use longhaul_realm::Now;
use longhaul_realm::member::{Action, Config, Failure, Input, Member, Notice};
use longhaul_realm::membership::{Standing, Why};
use longhaul_realm::protocol::LeaseAnswer;
use longhaul_realm::ruleset::ServerEntry;
use longhaul_realm::server::WriteId;
use longhaul_realm::wire::{decode, encode};
use longhaul_transport::{
    CloseCode, Control, Endpoint, NameCollision, RendezvousProtocol, Scope, TrustedHost,
};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;

/// Inputs that wait.
const INPUTS_WAITING: usize = 1024;
/// How often the members are compared with the wall clock.
const LOOK: Duration = Duration::from_secs(30);
/// The life of a registration, in seconds.
const TTL_S: u16 = 60;
/// Notices that are shown.
const NOTICES_MAX: usize = 32;

/// Requests for leases have numbers from here on, others below.
const LEASES_FROM: u32 = 1 << 31;

/// The answer to a request for a lease.
type LeaseResult = Result<LeaseAnswer, Failure>;

/// What a member needs.
#[derive(Debug)]
pub struct Options {
    /// This host's connections.
    pub endpoint: Endpoint,
    /// The state folder, where the member file is.
    pub folder: PathBuf,
    /// What the file has.
    pub stored: Stored,
    /// Name and version of the program, for Hellos.
    pub software: String,
    /// What takes events. Without it nobody does.
    pub events: Option<mpsc::Sender<Event>>,
}

/// Something for the driver.
#[derive(Debug)]
pub(super) enum Incoming {
    Up(HostId, u64, Up),
    Down(HostId, u64, String),
    Message(HostId, u64, Bytes),
    Written(WriteId, bool),
    Input(Input),
    /// A channel for gossip with a host, by its number.
    Peer(HostId, u64, mpsc::Sender<Vec<u8>>),
    PeerGone(HostId, u64),
    Gossip(HostId, Bytes),
    Lease(StoreId, String, Generation, oneshot::Sender<LeaseResult>),
    Stop,
}

/// A running member. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Handle {
    pub(super) inputs: mpsc::Sender<Incoming>,
    status: watch::Receiver<Arc<Status>>,
}

impl Handle {
    /// Passes an input to the state machine: requests, candidates, networks.
    pub async fn input(&self, input: Input) {
        // Fails only when the member has stopped: nobody waits for an answer then.
        let _ = self.inputs.send(Incoming::Input(input)).await;
    }

    /// Asks the arbiter for the lease of a guest in a generation. May wait for long: limit it.
    pub async fn acquire(
        &self,
        store: StoreId,
        guest: &str,
        generation: Generation,
    ) -> Result<Acquired, String> {
        let (answer, answered) = oneshot::channel();
        let order = Incoming::Lease(store, guest.to_owned(), generation, answer);
        // Fails only when the member has stopped, and then nothing answers.
        let _ = self.inputs.send(order).await;
        match answered.await.unwrap_or(Err(Failure::NoServer)) {
            Ok(LeaseAnswer::Granted { .. }) => Ok(Acquired::Granted),
            Ok(LeaseAnswer::Refused { latest }) => Ok(Acquired::Denied {
                latest: latest.generation,
                holder: latest.holder,
            }),
            Ok(LeaseAnswer::Released) => Err("the arbiter answers another question".to_owned()),
            Err(failure) => Err(failure.to_string()),
        }
    }

    /// Returns the host's view of its realm, and its changes.
    pub fn status(&self) -> watch::Receiver<Arc<Status>> {
        self.status.clone()
    }

    /// Gossips on a control connection, which this host dialled, while it lives. `suite` seals the
    /// frames between the two hosts.
    pub fn connected(&self, control: &Control, suite: Suite) {
        super::gossip::dial(self.inputs.clone(), control.clone(), suite);
    }

    /// Gossips on a channel that another host opened with [`GOSSIP_CHANNEL`].
    ///
    /// [`GOSSIP_CHANNEL`]: super::GOSSIP_CHANNEL
    pub fn accepted(&self, host: HostId, channel: longhaul_transport::Channel) {
        super::gossip::accept(self.inputs.clone(), host, channel);
    }

    /// Ends the member: its connections with servers, and its entries in the trust store.
    pub async fn stop(&self) {
        // Fails only when it has stopped already.
        let _ = self.inputs.send(Incoming::Stop).await;
    }
}

/// Starts a member. Requires a tokio runtime.
pub fn start(options: Options) -> Result<(Handle, JoinHandle<()>), MemberError> {
    let Options {
        endpoint,
        folder,
        stored,
        software,
        events,
    } = options;
    let mut seed = [0; 8];
    getrandom::fill(&mut seed).map_err(MemberError::Random)?;
    let config = Config {
        host: endpoint.host_id(),
        realm: stored.realm,
        servers: stored.servers.clone(),
        ttl_s: TTL_S,
    };
    let start = Instant::now();
    let seed = u64::from_le_bytes(seed);
    let member = Member::new(config, &stored.kept, seed, now(start))?;
    let (inputs, incoming) = mpsc::channel(INPUTS_WAITING);
    let told = inputs.clone();
    let writer = Writer::start(folder, stored, move |id, durable| {
        // Fails only when the member has stopped.
        let _ = told.blocking_send(Incoming::Written(id, durable));
    })?;
    // What is settled need not be kept.
    writer.put(Order::All(member.kept()));
    let status = Status {
        realm: member.membership().realm(),
        standing: Standing::Stranger(Why::NoRuleset),
        version: 0,
        expires_s: 0,
        members: Vec::new(),
        networks: Vec::new(),
        servers: Vec::new(),
        arbiter: None,
        notices: Vec::new(),
        refused: (0, None),
    };
    let (shown, watched) = watch::channel(Arc::new(status.clone()));
    let driver = Driver {
        start,
        member,
        endpoint,
        protocol: RendezvousProtocol::new(software),
        writer,
        inputs: inputs.clone(),
        events,
        links: BTreeMap::new(),
        next_try: 1,
        leases: BTreeMap::new(),
        next_lease: LEASES_FROM,
        peers: Peers::default(),
        trusted: BTreeSet::new(),
        collisions: Vec::new(),
        looked: None,
        status,
        shown,
    };
    let task = tokio::spawn(driver.run(incoming));
    let handle = Handle {
        inputs,
        status: watched,
    };
    Ok((handle, task))
}

fn now(start: Instant) -> Now {
    let unix = SystemTime::now().duration_since(UNIX_EPOCH);
    Now {
        steady: start.elapsed(),
        unix_s: unix.unwrap_or(Duration::ZERO).as_secs(),
    }
}

/// Ends all connections with a host, unless it is trusted by hand.
pub(crate) fn cut(endpoint: &Endpoint, host: HostId, why: &str) {
    let by_hand = endpoint.trust().list().unwrap_or_else(|error| {
        tracing::warn!(%error, "the hosts trusted by hand cannot be read");
        Vec::new()
    });
    if by_hand.iter().all(|trusted| trusted.id != host) {
        endpoint.disconnect(host, CloseCode::NotAllowed, why);
    }
}

/// A server that is dialled or connected.
#[derive(Debug)]
struct Link {
    entry: ServerEntry,
    number: u64,
    task: Option<JoinHandle<()>>,
    up: Option<Up>,
    error: Option<String>,
}

struct Driver {
    start: Instant,
    member: Member,
    endpoint: Endpoint,
    protocol: RendezvousProtocol,
    writer: Writer,
    inputs: mpsc::Sender<Incoming>,
    events: Option<mpsc::Sender<Event>>,
    links: BTreeMap<HostId, Link>,
    next_try: u64,
    /// The requests for leases that wait for an answer.
    leases: BTreeMap<u32, oneshot::Sender<LeaseResult>>,
    next_lease: u32,
    peers: Peers,
    /// The members in the trust store.
    trusted: BTreeSet<HostId>,
    collisions: Vec<NameCollision>,
    /// When the members were last compared with the clock.
    looked: Option<Instant>,
    status: Status,
    shown: watch::Sender<Arc<Status>>,
}

impl Driver {
    async fn run(mut self, mut incoming: mpsc::Receiver<Incoming>) {
        loop {
            self.act();
            self.look();
            self.show();
            let due = self.member.next_timeout();
            let left = due.saturating_sub(self.start.elapsed());
            tokio::select! {
                next = incoming.recv() => match next {
                    Some(Incoming::Stop) | None => break,
                    Some(next) => self.take(next),
                },
                () = tokio::time::sleep(left) => self.handle(Input::Timeout),
            }
        }
        for link in self.links.values_mut() {
            drop(link.up.take());
        }
        self.trust(Vec::new());
        // The thread must not wait for this task while this task waits for it.
        drop(incoming);
        let writer = self.writer;
        if tokio::task::spawn_blocking(move || drop(writer))
            .await
            .is_err()
        {
            tracing::error!("the realm's documents were not written to the end");
        }
    }

    fn handle(&mut self, input: Input) {
        self.member.handle(now(self.start), input);
    }

    fn take(&mut self, incoming: Incoming) {
        match incoming {
            Incoming::Up(server, number, up) => self.up(server, number, up),
            Incoming::Down(server, number, error) => {
                let is_it = |link: &&mut Link| link.number == number;
                if let Some(link) = self.links.get_mut(&server).filter(is_it) {
                    tracing::debug!(%server, error, "a rendezvous server is not connected");
                    link.task = None;
                    link.error = Some(error);
                    if link.up.take().is_some() {
                        self.tell(Event::ServerDown(server));
                    }
                    self.handle(Input::Disconnected(server));
                }
            }
            Incoming::Message(server, number, bytes) => self.message(server, number, &bytes),
            Incoming::Written(id, true) => self.handle(Input::Persisted(id)),
            Incoming::Written(id, false) => self.handle(Input::PersistFailed(id)),
            Incoming::Input(input) => self.handle(input),
            Incoming::Peer(host, number, sender) => {
                if self.peers.add(host, number, sender) {
                    self.handle(Input::PeerConnected(host));
                }
            }
            Incoming::PeerGone(host, number) => {
                if self.peers.remove(host, number) {
                    self.handle(Input::PeerDisconnected(host));
                }
            }
            Incoming::Gossip(host, bytes) => match decode(&bytes) {
                Ok(gossip) => self.handle(Input::Gossip(host, gossip)),
                Err(error) => {
                    tracing::info!(%host, %error, "gossip that is none: the channel is closed");
                    self.peers.close(host);
                    self.handle(Input::PeerDisconnected(host));
                }
            },
            Incoming::Lease(store, guest, generation, answer) => {
                // Who asked may have gone since.
                self.leases.retain(|_, answer| !answer.is_closed());
                let request = self.next_lease;
                self.next_lease = request.wrapping_add(1).max(LEASES_FROM);
                self.leases.insert(request, answer);
                self.handle(Input::AcquireLease(request, store, guest, generation));
            }
            Incoming::Stop => {}
        }
    }

    /// The answer to a request. Who asked for a lease may have gone since.
    fn answered(&mut self, request: u32, answer: LeaseResult) {
        if let Some(asked) = self.leases.remove(&request) {
            let _ = asked.send(answer);
            return;
        }
        self.tell(match answer {
            Ok(answer) => Event::Lease(request, answer),
            Err(failure) => Event::Failed(request, failure),
        });
    }

    fn up(&mut self, server: HostId, number: u64, mut up: Up) {
        let is_it = |link: &&mut Link| link.number == number;
        let Some(link) = self.links.get_mut(&server).filter(is_it) else {
            return up.handle.close(CloseCode::Done, "no longer needed");
        };
        tracing::info!(%server, way = up.way, "a rendezvous server is connected");
        let leg = up.leg.take();
        link.up = Some(up);
        link.error = None;
        if let Some(leg) = leg {
            self.tell(Event::ServerUp(server, leg));
        }
        self.handle(Input::Connected(server));
    }

    fn message(&mut self, server: HostId, number: u64, bytes: &[u8]) {
        let Some(link) = self.links.get(&server) else {
            return;
        };
        match decode(bytes) {
            _ if link.number != number => {}
            Ok(message) => self.handle(Input::Message(server, message)),
            Err(error) => {
                if let Some(up) = &link.up {
                    up.handle.close(CloseCode::Violation, &error.to_string());
                }
            }
        }
    }

    fn tell(&self, event: Event) {
        if let Some(events) = &self.events
            && let Err(mpsc::error::TrySendError::Full(event)) = events.try_send(event)
        {
            tracing::warn!(?event, "an event of the realm is lost: nobody takes them");
        }
    }

    /// Carries out what the state machine wants.
    fn act(&mut self) {
        while let Some(action) = self.member.next_action() {
            match action {
                Action::Connect(entry) => self.connect(entry),
                Action::Disconnect(server) => self.disconnect(server),
                Action::Send(server, message) => self.send(server, &message),
                Action::Gossip(host, gossip) => match encode(&gossip) {
                    Ok(bytes) => self.peers.send(host, bytes),
                    Err(error) => tracing::error!(%error, "gossip was not sent"),
                },
                Action::Persist(id, record) => {
                    if !self.writer.put(Order::Record(id, record)) {
                        self.handle(Input::PersistFailed(id));
                    }
                }
                Action::Changed => {
                    self.looked = None;
                    self.tell(Event::Changed);
                }
                Action::Cut(host, why) => {
                    self.peers.close(host);
                    cut(&self.endpoint, host, &why.to_string());
                    self.tell(Event::Cut(host, why));
                }
                Action::Introduced {
                    request,
                    server,
                    peer,
                    start_ms,
                } => self.tell(Event::Introduced {
                    request,
                    server,
                    peer,
                    start_ms,
                }),
                Action::Signal(host, bytes) => self.tell(Event::Signal(host, bytes)),
                Action::RelayOpened {
                    request,
                    server,
                    session,
                    peer,
                    bytes_per_s,
                } => self.tell(Event::RelayOpened {
                    request,
                    server,
                    session,
                    peer,
                    bytes_per_s,
                }),
                Action::RelayClosed(server, id) => self.tell(Event::RelayClosed(server, id)),
                Action::Lease(request, answer) => self.answered(request, Ok(answer)),
                Action::Failed(request, failure) => self.answered(request, Err(failure)),
                Action::Notice(notice) => self.notice(notice),
            }
        }
    }

    fn connect(&mut self, entry: ServerEntry) {
        let number = self.next_try;
        self.next_try += 1;
        let task = tokio::spawn(link::run(
            self.endpoint.clone(),
            entry.clone(),
            self.protocol.clone(),
            number,
            self.inputs.clone(),
        ));
        let error = self.links.remove(&entry.id).and_then(|old| old.error);
        let link = Link {
            entry: entry.clone(),
            number,
            task: Some(task),
            up: None,
            error,
        };
        self.links.insert(entry.id, link);
    }

    fn disconnect(&mut self, server: HostId) {
        let Some(link) = self.links.remove(&server) else {
            return;
        };
        match (link.up, link.task) {
            // What waits is sent, then the task ends the connection.
            (Some(up), _) => {
                drop(up);
                self.tell(Event::ServerDown(server));
            }
            (None, Some(task)) => task.abort(),
            (None, None) => {}
        }
    }

    fn send<M: Message>(&mut self, server: HostId, message: &M) {
        let Some(up) = self.links.get(&server).and_then(|link| link.up.as_ref()) else {
            return;
        };
        match encode(message) {
            Ok(bytes) => {
                if up.out.try_send(bytes).is_err() {
                    let reason = "the server takes no messages";
                    up.handle.close(CloseCode::Busy, reason);
                }
            }
            Err(error) => tracing::error!(%error, "a message for a server was not sent"),
        }
    }

    fn notice(&mut self, notice: Notice) {
        if let Notice::Refused(server, refused) = &notice {
            self.status.refused.0 += 1;
            self.status.refused.1 = Some((*server, refused.clone()));
        }
        self.say(describe(&notice));
    }

    fn say(&mut self, text: String) {
        tracing::warn!("{text}");
        if self.status.notices.last() != Some(&text) {
            self.status.notices.push(text);
        }
        let many = self.status.notices.len().saturating_sub(NOTICES_MAX);
        self.status.notices.drain(..many);
    }

    /// Brings the trust store and the status in line with the members now.
    fn look(&mut self) {
        if self.looked.is_some_and(|at| at.elapsed() < LOOK) {
            return;
        }
        self.looked = Some(Instant::now());
        let now = now(self.start);
        let membership = self.member.membership();
        let own = self.endpoint.host_id();
        let ruleset = membership.ruleset();
        let members = membership.members(now.unix_s);
        let connectable = |host: HostId| membership.standing(host, now.unix_s).is_member();
        let others = members.iter().filter(|one| one.id != own);
        let trusted = others.filter(|one| connectable(one.id));
        let trusted = trusted.map(|member| TrustedHost {
            name: member.name.clone(),
            id: member.id,
            addresses: Vec::new(),
            scope: Scope {
                may_query: member.scope.may_query,
                may_send_guests: member.scope.may_send_guests,
            },
        });
        let trusted: Vec<TrustedHost> = trusted.collect();
        self.status.standing = membership.standing(own, now.unix_s);
        self.status.version = membership.version();
        self.status.expires_s = ruleset.map_or(0, |ruleset| ruleset.expires_s);
        let arbiter = ruleset.and_then(|ruleset| ruleset.arbiter);
        self.status.arbiter = arbiter.map(|arbiter| (arbiter.server, arbiter.store));
        self.status.networks = ruleset.map_or_else(Vec::new, |ruleset| ruleset.networks.clone());
        self.status.members = members;
        self.trust(trusted);
    }

    /// Replaces the members in the trust store, and cuts those that are none any more.
    fn trust(&mut self, trusted: Vec<TrustedHost>) {
        let ids: BTreeSet<HostId> = trusted.iter().map(|host| host.id).collect();
        let gone: Vec<HostId> = self.trusted.difference(&ids).copied().collect();
        match self.endpoint.trust().set_members(trusted) {
            Ok(collisions) => {
                for collision in &collisions {
                    if !self.collisions.contains(collision) {
                        self.say(collision.to_string());
                    }
                }
                self.collisions = collisions;
            }
            Err(error) => self.say(format!("the hosts trusted by hand cannot be read: {error}")),
        }
        self.trusted = ids;
        // Under a ruleset that has ended, what is connected stays for a while.
        let unix_s = now(self.start).unix_s;
        for host in gone {
            let standing = self.member.membership().standing(host, unix_s);
            if let Standing::Stranger(why) = standing {
                cut(&self.endpoint, host, &why.to_string());
            }
        }
    }

    fn show(&mut self) {
        let links = self.member.links();
        let state = |one: longhaul_realm::member::LinkStatus| {
            let link = self.links.get(&one.server)?;
            Some(LinkState {
                server: link.entry.clone(),
                registered: one.registered,
                way: link.up.as_ref().map(|up| up.way),
                version: one.version,
                failures: one.failures,
                error: link.error.clone(),
            })
        };
        self.status.servers = links.into_iter().filter_map(state).collect();
        let status = &self.status;
        self.shown.send_if_modified(|shown| {
            let differs = **shown != *status;
            if differs {
                *shown = Arc::new(status.clone());
            }
            differs
        });
    }
}

fn describe(notice: &Notice) -> String {
    match notice {
        Notice::ClockBehind(behind_s) => format!(
            "the ruleset was issued {behind_s} s in the future by this host's clock: check it"
        ),
        Notice::Document(from, error) => format!("a document of {from} is not accepted: {error}"),
        Notice::Refused(server, refused) => {
            let hint = refused.hint.as_ref().map(|hint| format!("; {hint}"));
            let hint = hint.unwrap_or_default();
            format!("rendezvous server {server} refused: {}{hint}", refused.text)
        }
        Notice::TokenUsedTwice(hosts) => {
            let hosts: Vec<String> = hosts.iter().map(HostId::to_string).collect();
            format!(
                "one token was used by {}: neither is a member until the operator lists one",
                hosts.join(" and ")
            )
        }
        Notice::Stranger(server, host) => {
            format!("rendezvous server {server} named {host}, which is no member: ignored")
        }
        Notice::Storage => {
            "the disk does not take the realm's ruleset: it counts until a restart".to_owned()
        }
    }
}
