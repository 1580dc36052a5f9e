//! Gives rulesets to rendezvous servers, and learns from them which hosts joined.

use super::folder::{Folder, PlannedHost, hex};
use crate::cli::error::CliError;
use futures_util::future::join_all;
use futures_util::stream::{FuturesUnordered, StreamExt};
use longhaul_network::member::connect_server;
use longhaul_realm::enrolment::Enrolment;
use longhaul_realm::membership::Membership;
use longhaul_realm::protocol::{ToHost, ToServer};
use longhaul_realm::ruleset::{Ruleset, ServerEntry, SignedRuleset};
use longhaul_realm::wire::{decode, encode};
use longhaul_transport::{
    CloseCode, Endpoint, EndpointConfig, Identity, Received, RendezvousLink, RendezvousProtocol,
    TRUST_FILE, TrustStore,
};
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;
use tokio::time::{Instant, sleep_until, timeout};

/// How long a server may take to answer.
const ANSWER: Duration = Duration::from_secs(15);
/// How long the others may take to connect when one is connected: a server closes connections on
/// which nothing is said.
const OTHERS: Duration = Duration::from_secs(4);
/// Messages that are read while one is waited for.
const MESSAGES_MAX: usize = 16;

/// What a server says to a ruleset.
struct Answer {
    /// The one in force there.
    ruleset: SignedRuleset,
    enrolments: Vec<Enrolment>,
}

/// A server, and the connection with it or why there is none.
pub(super) struct Reached {
    pub(super) server: ServerEntry,
    link: Result<RendezvousLink, String>,
}

impl Reached {
    /// Returns why the server is not reached.
    pub(super) fn error(&self) -> Option<&str> {
        self.link.as_ref().err().map(String::as_str)
    }
}

/// The operator's connections.
pub(super) struct Servers {
    endpoint: Endpoint,
    pub(super) reached: Vec<Reached>,
}

impl Servers {
    /// Connects to all servers, at once. Those that do not answer delay the others by
    /// [`OTHERS`] only.
    pub(super) async fn connect(
        folder: &Folder,
        servers: Vec<ServerEntry>,
    ) -> Result<Self, CliError> {
        let failed = |text: String| CliError::failed("realm", text);
        let identity = Identity::load_or_create(folder.path());
        let identity = identity.map_err(|error| failed(error.to_string()))?;
        let trust = TrustStore::open(&folder.path().join(TRUST_FILE));
        let trust = trust.map_err(|error| failed(error.to_string()))?;
        let software = format!("longhaul {}", env!("CARGO_PKG_VERSION"));
        let protocol = RendezvousProtocol::new(software);
        let bind = |address: SocketAddr| {
            let config = EndpointConfig::new(address, protocol.hello.clone());
            Endpoint::bind(config, identity.clone(), trust.clone())
        };
        let endpoint = bind((Ipv6Addr::UNSPECIFIED, 0).into())
            .or_else(|_| bind((Ipv4Addr::UNSPECIFIED, 0).into()))
            .map_err(|error| failed(error.to_string()))?;
        let mut left: BTreeMap<usize, ServerEntry> = servers.into_iter().enumerate().collect();
        let dials = left.clone().into_iter().map(|(place, server)| {
            let (endpoint, protocol) = (&endpoint, &protocol);
            async move {
                let link = connect_server(endpoint, &server, protocol).await;
                (place, link.map_err(|error| error.to_string()))
            }
        });
        let mut dials: FuturesUnordered<_> = dials.collect();
        let mut reached = BTreeMap::new();
        let mut end: Option<Instant> = None;
        loop {
            let over = async {
                match end {
                    Some(end) => sleep_until(end).await,
                    None => std::future::pending().await,
                }
            };
            let (place, link) = tokio::select! {
                dialled = dials.next() => match dialled {
                    Some(dialled) => dialled,
                    None => break,
                },
                () = over => break,
            };
            if link.is_ok() {
                end.get_or_insert_with(|| Instant::now() + OTHERS);
            }
            if let Some(server) = left.remove(&place) {
                reached.insert(place, Reached { server, link });
            }
        }
        drop(dials);
        let late = left.into_iter().map(|(place, server)| {
            let link = Err(format!("no answer within {} s", OTHERS.as_secs()));
            (place, Reached { server, link })
        });
        reached.extend(late);
        let reached = reached.into_values().collect();
        Ok(Self { endpoint, reached })
    }

    /// Gives a ruleset to all servers that are reached. Returns the answers; a server that does
    /// not give one is not reached any more.
    pub(super) async fn give(&mut self, ruleset: &SignedRuleset) -> Vec<(u64, Vec<Enrolment>)> {
        let asked = self.reached.iter_mut().map(|reached| async move {
            let link = reached.link.as_mut().ok()?;
            let answer = timeout(ANSWER, ask(link, ruleset)).await;
            let answer = answer.unwrap_or_else(|_| Err("it does not answer".to_owned()));
            let verified = answer.and_then(|answer| {
                let verified = answer.ruleset.verify(ruleset.key.realm());
                let verified = verified.map_err(|error| error.to_string())?;
                Ok((verified.content().version, answer.enrolments))
            });
            verified.map_err(|error| reached.link = Err(error)).ok()
        });
        join_all(asked).await.into_iter().flatten().collect()
    }

    /// Ends the connections.
    pub(super) async fn close(self) {
        for reached in self.reached {
            if let Ok(link) = reached.link {
                link.sender.close(CloseCode::Done, "published").await;
            }
        }
        self.endpoint.close("published").await;
    }
}

async fn ask(link: &mut RendezvousLink, ruleset: &SignedRuleset) -> Result<Answer, String> {
    let message = encode(&ToServer::Ruleset(ruleset.clone()));
    let message = message.map_err(|error| error.to_string())?;
    let sent = link.sender.send(message).await;
    sent.map_err(|error| error.to_string())?;
    let mut enrolments = Vec::new();
    for _ in 0..MESSAGES_MAX {
        let received = link.receiver.recv().await;
        let bytes = match received.map_err(|error| error.to_string())? {
            Some(Received::Message(bytes)) => bytes,
            Some(Received::Datagram(_)) => continue,
            None => return Err("it ended the connection".to_owned()),
        };
        match decode(&bytes).map_err(|error| error.to_string())? {
            ToHost::Ruleset(ruleset) => {
                return Ok(Answer {
                    ruleset,
                    enrolments,
                });
            }
            ToHost::Enrolments(more) => enrolments = more,
            ToHost::Refused(refused) => return Err(refused.text),
            _ => {}
        }
    }
    Err("it does not say which ruleset is in force".to_owned())
}

/// Lists hosts that joined by tokens in the working copy. Returns their names, and what stands
/// against the others.
pub(super) fn confirm(
    folder: &mut Folder,
    last: &Ruleset,
    enrolments: &[Enrolment],
    unix_s: u64,
) -> (Vec<String>, Vec<String>) {
    let mut known = Membership::new(folder.realm());
    if let Some(Ok(verified)) = folder.signed.as_ref().map(|r| r.verify(last.realm)) {
        known.install(verified, unix_s);
    }
    for enrolment in enrolments {
        // What is void is settled, and what is forged counts for nothing.
        let _ = known.enrol(enrolment, unix_s);
    }
    let (mut joined, mut problems) = (Vec::new(), Vec::new());
    let members = known.members(unix_s);
    for member in members.into_iter().filter(|member| member.pending) {
        let token = known.enrolments().find(|one| one.host() == member.id);
        let token = token.map(|one| hex(&one.token().0));
        let fingerprint = member.id.to_string();
        let known_as = folder
            .plan
            .host
            .get(&member.name)
            .map(|host| &host.fingerprint);
        if folder.plan.removed.contains_key(&fingerprint) || known_as == Some(&fingerprint) {
            continue;
        }
        if known_as.is_some() {
            problems.push(format!(
                "{} joined, and another host has the name in realm.toml: rename one there",
                member.name
            ));
            continue;
        }
        for network in folder.plan.network.values_mut() {
            let of_token = member.networks.iter().any(|id| hex(&id.0) == network.id);
            if of_token && !network.members.contains(&member.name) {
                network.members.push(member.name.clone());
            }
        }
        let host = PlannedHost {
            fingerprint,
            site: member.site.clone(),
            may_query: member.scope.may_query,
            may_send_guests: member.scope.may_send_guests,
            token: token.clone(),
        };
        folder.plan.host.insert(member.name.clone(), host);
        if let Some(token) = token {
            folder.plan.token.remove(&token);
        }
        joined.push(member.name);
    }
    joined.sort_unstable();
    let twice = known
        .enrolments()
        .filter(|one| known.user_of(one.token()).is_none());
    for one in twice {
        problems.push(format!(
            "the token of `{}` was used by {}, and by another host: neither is a member; list the \
             right one in realm.toml with this token, or remove both",
            one.authorisation().name,
            one.host()
        ));
    }
    (joined, problems)
}
