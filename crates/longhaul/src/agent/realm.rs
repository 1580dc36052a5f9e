//! Owns this host's realm in the agent: joins, shows, leaves, and starts it with the agent.

use longhaul_api::{
    ApiError, ErrorCode, HostPath, JoinRealm, PathKind, Realm, RealmGateway, RealmMember,
    RealmNetwork, RealmServer, RealmStanding, RealmStatus, Scope,
};
use longhaul_hypervisor::config::RealmNetworks;
use longhaul_migration::host::config::Config;
use longhaul_migration::host::start_error::StartError;
use longhaul_network::member::{Handle, MEMBER_FILE, Status, Stored};
use longhaul_network::networks::{self, NetworkStatus, Networks, NetworksError, Options, Slot};
use longhaul_network::plane::PlaneConfig;
use longhaul_network::reach::PeerStatus;
use longhaul_protocol::HostId;
use longhaul_realm::membership::{Member, Standing, Why};
use longhaul_realm::protocol::{Refused, RefusedCode};
use longhaul_realm::ruleset::NetworkEntry;
use longhaul_realm::token::{Token, TokenError};
use longhaul_transport::{Endpoint, Way};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::Mutex;
use tokio::time::timeout;

/// How long a join waits for a server.
const JOIN_WAIT: Duration = Duration::from_secs(30);

/// The realm of this host.
pub(crate) struct Realms {
    endpoint: Endpoint,
    folder: PathBuf,
    configured: Vec<SocketAddr>,
    port_mapping: bool,
    /// Where the names of its networks go.
    names: RealmNetworks,
    /// What runs of it.
    slot: Slot,
    /// Held while it changes.
    changing: Mutex<()>,
}

impl Realms {
    /// Starts the member if the state folder has one.
    pub(crate) fn start(
        endpoint: Endpoint,
        config: &Config,
        slot: Slot,
    ) -> Result<Self, StartError> {
        let cannot = |error: &dyn std::fmt::Display| {
            StartError::new(format!("cannot take part in the realm: {error}"))
        };
        let realms = Self {
            endpoint,
            folder: config.state.clone(),
            configured: config.addresses.clone(),
            port_mapping: config.port_mapping,
            names: config.hypervisor.realm_networks.clone(),
            slot,
            changing: Mutex::new(()),
        };
        let stored = Stored::read(&realms.folder).map_err(|error| cannot(&error))?;
        if let Some(stored) = stored {
            realms.run(stored).map_err(|error| cannot(&error))?;
        }
        Ok(realms)
    }

    /// Starts the networks. There are none yet.
    fn run(&self, stored: Stored) -> Result<Arc<Networks>, NetworksError> {
        let names = self.names.clone();
        let networks = networks::start(Options {
            endpoint: self.endpoint.clone(),
            folder: self.folder.clone(),
            stored,
            software: format!("longhaul {}", env!("CARGO_PKG_VERSION")),
            configured: self.configured.clone(),
            port_mapping: self.port_mapping,
            plane: PlaneConfig::default(),
            opened: Box::new(move |open| {
                let bridges = open.into_iter();
                names.set(bridges.map(|(name, open)| (name, open.bridge)).collect());
            }),
        })?;
        let networks = Arc::new(networks);
        self.slot.set(Some(networks.clone()));
        Ok(networks)
    }

    /// Ends the networks; the documents of the realm stay.
    pub(crate) async fn stop(&self) {
        if let Some(networks) = self.slot.set(None) {
            networks.stop().await;
        }
    }

    /// Returns the realm.
    pub(crate) async fn get(&self) -> RealmStatus {
        let own = self.endpoint.host_id();
        RealmStatus {
            realm: self.slot.get().map(|networks| shown(own, &networks)),
        }
    }

    /// Joins a realm: the token names this host, a server takes it, and the ruleset arrives.
    pub(crate) async fn join(&self, join: JoinRealm) -> Result<RealmStatus, ApiError> {
        let token = Token::parse(join.token.trim()).map_err(|error| bad_token(&error))?;
        let _changing = self.changing.lock().await;
        if let Some(networks) = self.slot.get() {
            let status = networks.realm();
            if status.realm != token.realm() || status.standing.is_member() {
                let text = format!("this host is in realm {} already", status.realm);
                return Err(ApiError::new(ErrorCode::AlreadyExists, text)
                    .hint("`longhaul host leave` forgets it"));
            }
        }
        let before = Stored::read(&self.folder).map_err(|error| internal(&error))?;
        self.stop().await;
        let own = self.endpoint.host_id();
        let unix = SystemTime::now().duration_since(UNIX_EPOCH);
        let unix_s = unix.unwrap_or(Duration::ZERO).as_secs();
        let stored = Stored::of_token(&token, own, unix_s).map_err(|error| bad_token(&error))?;
        self.put(stored.clone()).await?;
        let networks = self.run(stored).map_err(|error| internal(&error))?;
        match taken(networks.member()).await {
            Ok(status) => {
                tracing::info!(realm = %status.realm, "joined a realm");
                let realm = Some(shown(own, &networks));
                Ok(RealmStatus { realm })
            }
            Err(error) => {
                self.stop().await;
                match before {
                    Some(before) => {
                        self.put(before.clone()).await?;
                        self.run(before).map_err(|error| internal(&error))?;
                    }
                    None => self.remove().await?,
                }
                Err(error)
            }
        }
    }

    /// Forgets the realm.
    pub(crate) async fn leave(&self) -> Result<(), ApiError> {
        let _changing = self.changing.lock().await;
        let Some(networks) = self.slot.set(None) else {
            let text = "this host is in no realm";
            return Err(ApiError::new(ErrorCode::TooLate, text));
        };
        networks.leave().await;
        self.names.set(BTreeMap::new());
        self.remove().await
    }

    async fn put(&self, stored: Stored) -> Result<(), ApiError> {
        let folder = self.folder.clone();
        let written = tokio::task::spawn_blocking(move || stored.write(&folder)).await;
        written
            .map_err(|error| internal(&error))?
            .map_err(|error| internal(&error))
    }

    async fn remove(&self) -> Result<(), ApiError> {
        let removed = tokio::fs::remove_file(self.folder.join(MEMBER_FILE)).await;
        removed.map_err(|error| internal(&error))
    }
}

/// Waits until this host is registered, or until it is clear that it will not be.
async fn taken(handle: &Handle) -> Result<Arc<Status>, ApiError> {
    let mut status = handle.status();
    let wanted = |status: &Arc<Status>| status.is_registered() || refusal(status).is_some();
    let waited = timeout(JOIN_WAIT, status.wait_for(wanted)).await;
    let waited = waited.map(|waited| waited.map(|status| status.clone()));
    let last = match waited {
        Ok(Ok(status)) => status,
        Ok(Err(error)) => return Err(internal(&error)),
        Err(_) => status.borrow().clone(),
    };
    if last.is_registered() {
        return Ok(last);
    }
    if let Some(refused) = refusal(&last) {
        let hint = refused.hint.clone();
        let hint = hint.unwrap_or_else(|| "ask the operator for another token".to_owned());
        return Err(ApiError::new(ErrorCode::Refused, refused.text.clone()).hint(hint));
    }
    let connected = last.servers.iter().any(|server| server.way.is_some());
    let text = match (&last.refused.1, connected) {
        (Some((_, refused)), _) => format!("no server took the token: {}", refused.text),
        (None, true) => "a rendezvous server is reached, and does not answer".to_owned(),
        (None, false) => {
            let tried = last
                .servers
                .iter()
                .filter_map(|server| server.error.clone());
            let tried: Vec<String> = tried.collect();
            format!("no rendezvous server is reached: {}", tried.join("; "))
        }
    };
    Err(ApiError::new(ErrorCode::PeerUnreachable, text)
        .hint("nothing was kept: try again with the same token when a server answers"))
}

/// Returns a refusal that another try cannot change.
fn refusal(status: &Status) -> Option<&Refused> {
    let (_, refused) = status.refused.1.as_ref()?;
    let here = matches!(
        refused.code,
        RefusedCode::Document | RefusedCode::UnknownRealm
    );
    let last = refused.code == RefusedCode::TokenUsed || (here && status.servers.len() <= 1);
    last.then_some(refused)
}

fn bad_token(error: &TokenError) -> ApiError {
    ApiError::new(ErrorCode::InvalidRequest, error.to_string())
        .hint("the operator makes one with `longhaul host invite`")
}

fn internal(error: &dyn std::fmt::Display) -> ApiError {
    ApiError::new(ErrorCode::Internal, error.to_string())
}

fn shown(own: HostId, networks: &Networks) -> Realm {
    let (status, ways, ports) = (networks.realm(), networks.ways(), networks.ports());
    let (standing, reason) = match &status.standing {
        Standing::Member(member) if member.pending => (RealmStanding::Pending, None),
        Standing::Member(_) => (RealmStanding::Member, None),
        Standing::Expired(_) => (RealmStanding::Expired, Some(Why::Ended.to_string())),
        Standing::Stranger(why) => (RealmStanding::Stranger, Some(why.to_string())),
    };
    let members = status.members.iter();
    let name_of = |id: &HostId| members.clone().find(|member| member.id == *id);
    let port = |name: &str| ports.iter().find(|port| port.name == name);
    let open = |name: &str| Some(port(name)?.open.as_ref().ok()?.bridge.clone());
    let error = |name: &str| port(name)?.open.as_ref().err().cloned();
    let networks = status.networks.iter().map(|network| RealmNetwork {
        bridge: open(&network.name),
        error: error(&network.name),
        name: network.name.clone(),
        id: network
            .id
            .0
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect(),
        members: network
            .members
            .iter()
            .filter_map(name_of)
            .map(|member| member.name.clone())
            .collect(),
        mtu: network.mtu.into(),
        gateway: gateway(networks, &ports, network, &name_of),
    });
    let servers = status.servers.iter().map(|link| RealmServer {
        fingerprint: link.server.id.to_string(),
        addresses: link.server.addresses.clone(),
        registered: link.registered,
        way: link.way.map(str::to_owned),
        version: link.version,
        error: link.error.clone(),
    });
    Realm {
        id: status.realm.to_string(),
        name: name_of(&own).map(|member| member.name.clone()),
        standing,
        reason,
        version: status.version,
        expires_s: (status.expires_s > 0).then_some(status.expires_s),
        networks: networks.collect(),
        servers: servers.collect(),
        members: members
            .clone()
            .map(|member| RealmMember {
                name: member.name.clone(),
                fingerprint: member.id.to_string(),
                site: member.site.clone(),
                may: [
                    (member.scope.may_query, Scope::Query),
                    (member.scope.may_send_guests, Scope::Send),
                ]
                .into_iter()
                .filter_map(|(may, scope)| may.then_some(scope))
                .collect(),
                pending: member.pending,
                path: ways
                    .peers
                    .iter()
                    .find(|peer| peer.peer == member.id)
                    .map(path),
            })
            .collect(),
        notices: status.notices.clone(),
    }
}

/// Returns how the gateway of a network is used here.
fn gateway<'a>(
    networks: &Networks,
    ports: &[NetworkStatus],
    network: &NetworkEntry,
    name_of: &impl Fn(&HostId) -> Option<&'a Member>,
) -> Option<RealmGateway> {
    let entry = network.gateway.as_ref()?;
    let port = ports.iter().find(|port| port.name == network.name)?;
    let used = port.gateway.as_ref()?;
    let counts = port.open.as_ref().ok().and_then(|open| {
        // The network may have been closed meanwhile.
        networks.plane().gateway_counts(open.id).ok()
    });
    let (flows, spoofed) = counts.unwrap_or_default();
    let name = |id: &HostId| name_of(id).map(|member| member.name.clone());
    let number = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
    Some(RealmGateway {
        addresses: entry.addresses.iter().map(ToString::to_string).collect(),
        mac: entry.mac.map(|byte| format!("{byte:02x}")).join(":"),
        hosts: used.hosts.iter().filter_map(name).collect(),
        device: used.device.clone(),
        near: used.near.as_ref().and_then(name),
        flows: number(flows.flows),
        elsewhere: number(flows.elsewhere),
        forgotten: flows.full,
        given_up: flows.given_up,
        spoofed,
        error: used.error.clone(),
    })
}

/// Returns how a host is reached.
fn path(peer: &PeerStatus) -> HostPath {
    HostPath {
        kind: peer.way.map(|way| match way {
            Way::Direct { .. } => PathKind::Direct,
            Way::Relayed { .. } => PathKind::Relayed,
        }),
        round_trip_us: peer
            .round_trip
            .map(|time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX)),
        text: peer.text(),
    }
}
