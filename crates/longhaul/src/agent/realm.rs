//! Owns this host's realm in the agent: joins, shows, leaves, and starts it with the agent.

use longhaul_api::{
    ApiError, ErrorCode, JoinRealm, Realm, RealmMember, RealmNetwork, RealmServer, RealmStanding,
    RealmStatus, Scope,
};
use longhaul_migration::host::start_error::StartError;
use longhaul_network::member::{self, Handle, MEMBER_FILE, MemberError, Options, Status, Stored};
use longhaul_protocol::HostId;
use longhaul_realm::membership::{Standing, Why};
use longhaul_realm::protocol::{Refused, RefusedCode};
use longhaul_realm::token::{Token, TokenError};
use longhaul_transport::Endpoint;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::Mutex;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// How long a join waits for a server.
const JOIN_WAIT: Duration = Duration::from_secs(30);

/// The realm of this host.
pub(crate) struct Realms {
    endpoint: Endpoint,
    folder: PathBuf,
    running: Mutex<Option<Running>>,
}

struct Running {
    handle: Handle,
    task: JoinHandle<()>,
}

impl Running {
    async fn stop(self) {
        self.handle.stop().await;
        if self.task.await.is_err() {
            tracing::error!("the realm's part of the agent broke");
        }
    }
}

impl Realms {
    /// Starts the member if the state folder has one.
    pub(crate) fn start(endpoint: Endpoint, folder: PathBuf) -> Result<Self, StartError> {
        let cannot = |error: &dyn std::fmt::Display| {
            StartError::new(format!("cannot take part in the realm: {error}"))
        };
        let stored = Stored::read(&folder).map_err(|error| cannot(&error))?;
        let realms = Self {
            endpoint,
            folder,
            running: Mutex::new(None),
        };
        let running = stored.map(|stored| realms.run(stored));
        let running = running.transpose().map_err(|error| cannot(&error))?;
        Ok(Self {
            running: Mutex::new(running),
            ..realms
        })
    }

    fn run(&self, stored: Stored) -> Result<Running, MemberError> {
        let (handle, task) = member::start(Options {
            endpoint: self.endpoint.clone(),
            folder: self.folder.clone(),
            stored,
            software: format!("longhaul {}", env!("CARGO_PKG_VERSION")),
            events: None,
        })?;
        Ok(Running { handle, task })
    }

    /// Ends the member; its documents stay.
    pub(crate) async fn stop(&self) {
        if let Some(running) = self.running.lock().await.take() {
            running.stop().await;
        }
    }

    /// Returns the realm.
    pub(crate) async fn get(&self) -> RealmStatus {
        let running = self.running.lock().await;
        let own = self.endpoint.host_id();
        RealmStatus {
            realm: running
                .as_ref()
                .map(|running| shown(own, &running.handle.status().borrow())),
        }
    }

    /// Joins a realm: the token names this host, a server takes it, and the ruleset arrives.
    pub(crate) async fn join(&self, join: JoinRealm) -> Result<RealmStatus, ApiError> {
        let token = Token::parse(join.token.trim()).map_err(|error| bad_token(&error))?;
        let mut held = self.running.lock().await;
        if let Some(running) = held.as_ref() {
            let status = running.handle.status().borrow().clone();
            if status.realm != token.realm() || status.standing.is_member() {
                let text = format!("this host is in realm {} already", status.realm);
                return Err(ApiError::new(ErrorCode::AlreadyExists, text)
                    .hint("`longhaul host leave` forgets it"));
            }
        }
        let before = Stored::read(&self.folder).map_err(|error| internal(&error))?;
        if let Some(running) = held.take() {
            running.stop().await;
        }
        let own = self.endpoint.host_id();
        let unix = SystemTime::now().duration_since(UNIX_EPOCH);
        let unix_s = unix.unwrap_or(Duration::ZERO).as_secs();
        let stored = Stored::of_token(&token, own, unix_s).map_err(|error| bad_token(&error))?;
        self.put(stored.clone()).await?;
        let running = self.run(stored).map_err(|error| internal(&error))?;
        match taken(&running.handle).await {
            Ok(status) => {
                tracing::info!(realm = %status.realm, "joined a realm");
                *held = Some(running);
                let realm = Some(shown(own, &status));
                Ok(RealmStatus { realm })
            }
            Err(error) => {
                running.stop().await;
                match before {
                    Some(before) => {
                        self.put(before.clone()).await?;
                        *held = Some(self.run(before).map_err(|error| internal(&error))?);
                    }
                    None => self.remove().await?,
                }
                Err(error)
            }
        }
    }

    /// Forgets the realm.
    pub(crate) async fn leave(&self) -> Result<(), ApiError> {
        let mut held = self.running.lock().await;
        let Some(running) = held.take() else {
            let text = "this host is in no realm";
            return Err(ApiError::new(ErrorCode::TooLate, text));
        };
        running.stop().await;
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

fn shown(own: HostId, status: &Status) -> Realm {
    let (standing, reason) = match &status.standing {
        Standing::Member(member) if member.pending => (RealmStanding::Pending, None),
        Standing::Member(_) => (RealmStanding::Member, None),
        Standing::Expired(_) => (RealmStanding::Expired, Some(Why::Ended.to_string())),
        Standing::Stranger(why) => (RealmStanding::Stranger, Some(why.to_string())),
    };
    let members = status.members.iter();
    let name_of = |id: &HostId| members.clone().find(|member| member.id == *id);
    let networks = status.networks.iter().map(|network| RealmNetwork {
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
            })
            .collect(),
        notices: status.notices.clone(),
    }
}
