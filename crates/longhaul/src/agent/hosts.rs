//! Shows this host in the API, and manages its trust in others.

use crate::agent::guests::Guests;
use longhaul_api::{ApiError, ErrorCode, Host, Scope, Trust, TrustedHost, TrustedHosts};
use longhaul_migration::Manager;
use longhaul_migration::host::names::is_name;
use longhaul_migration::host::state::Parts;
use longhaul_migration::host::writable;
use longhaul_protocol::HostId;
use longhaul_protocol::wire::{VERSION, VERSION_OLDEST};
use longhaul_transport as transport;
use longhaul_transport::{TrustError, TrustStore};

/// The host and trust operations of the API.
pub(crate) struct Hosts {
    parts: Parts,
}

impl Hosts {
    pub(crate) fn new(parts: Parts) -> Self {
        Self { parts }
    }

    /// Returns this host.
    pub(crate) async fn this(&self, guests: &Guests) -> Host {
        let config = &self.parts.config;
        let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        Host {
            name: config.name.clone(),
            fingerprint: self.parts.identity.host_id().to_string(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            protocol_versions: (VERSION_OLDEST..=VERSION).map(u32::from).collect(),
            listen: Some(config.listen.to_string()),
            api_listen: config.api.tcp.as_ref().map(|tcp| tcp.listen.to_string()),
            state_folder: config.state.display().to_string(),
            qemus: guests.qemus().await,
            kvm: guests.kvm().await,
            memory_total_bytes: longhaul_migration::host::meminfo::meminfo(&memory, "MemTotal"),
            memory_free_bytes: longhaul_migration::host::meminfo::meminfo(&memory, "MemAvailable"),
            guests_running: guests.running(),
            not_writable: tokio::task::block_in_place(|| writable::refused(config)),
            pid: std::process::id(),
        }
    }

    /// Returns the trusted hosts.
    pub(crate) async fn list(&self) -> Result<TrustedHosts, ApiError> {
        let hosts = self.with_store(|store| store.list()).await?;
        Ok(TrustedHosts {
            hosts: hosts.iter().map(shown).collect(),
        })
    }

    /// Trusts a host.
    pub(crate) async fn trust(
        &self,
        manager: &Manager,
        trust: Trust,
    ) -> Result<TrustedHost, ApiError> {
        let host = self.checked(&trust)?;
        let answer = shown(&host);
        let wanted = host.name.clone();
        let before = self.with_store(move |store| store.by_name(&wanted)).await?;
        let replaced = before.filter(|before| trust.replace && before.id != host.id);
        if replaced.is_some() {
            may_go(manager, &trust.name)?;
        }
        remember_limits(manager)?;
        self.with_store(move |store| match trust.replace {
            true => store.replace(host),
            false => store.add(host),
        })
        .await?;
        remember_limits(manager)?;
        tracing::info!(host = %answer.name, fingerprint = %answer.fingerprint, "trusted");
        if let Some(replaced) = replaced {
            manager.disconnect(replaced.id);
        }
        Ok(answer)
    }

    /// Removes a host's trust, and ends all connections with it.
    pub(crate) async fn forget(&self, manager: &Manager, name: &str) -> Result<(), ApiError> {
        may_go(manager, name)?;
        remember_limits(manager)?;
        let name = name.to_owned();
        let host = self.with_store(move |store| store.forget(&name)).await?;
        tracing::info!(host = %host.name, fingerprint = %host.id, "trusted no longer");
        manager.disconnect(host.id);
        Ok(())
    }

    /// Refuses the name of a host that is not trusted.
    pub(crate) async fn require(&self, name: &str) -> Result<(), ApiError> {
        let wanted = name.to_owned();
        let found = self.with_store(move |store| store.by_name(&wanted)).await?;
        found.map(|_| ()).ok_or_else(|| unknown_host(name))
    }

    fn checked(&self, trust: &Trust) -> Result<transport::TrustedHost, ApiError> {
        let invalid = |message: String, hint: &str| {
            ApiError::new(ErrorCode::InvalidRequest, message).hint(hint)
        };
        if !is_name(&trust.name) {
            return Err(invalid(
                format!("{:?} cannot be the name of a host", trust.name),
                "1 to 63 letters, digits, `-`, `_` and `.`, the first a letter or digit",
            ));
        }
        let id: HostId = trust.fingerprint.parse().map_err(|error| {
            invalid(
                format!("{error}"),
                "`longhaul host` shows the fingerprint on that host",
            )
        })?;
        if id == self.parts.identity.host_id() {
            return Err(invalid(
                "that is this host's own fingerprint".to_owned(),
                "run `longhaul host` on the other host",
            ));
        }
        if trust.addresses.is_empty() {
            return Err(invalid(
                format!("{} needs an address", trust.name),
                "the address and port that its agent listens on, such as 192.0.2.7:7400",
            ));
        }
        Ok(transport::TrustedHost {
            name: trust.name.clone(),
            id,
            addresses: trust.addresses.clone(),
            scope: transport::Scope {
                may_query: trust.may.contains(&Scope::Query),
                may_send_guests: trust.may.contains(&Scope::Send),
            },
        })
    }

    /// Uses the store in a thread where waiting for the disk blocks nothing else.
    async fn with_store<T: Send + 'static>(
        &self,
        work: impl FnOnce(&TrustStore) -> Result<T, TrustError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let store = self.parts.trust.clone();
        let done = tokio::task::spawn_blocking(move || work(&store)).await;
        done.map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))?
            .map_err(|error| api_error(&error))
    }
}

fn shown(host: &transport::TrustedHost) -> TrustedHost {
    let scope = host.scope;
    let may = [
        (scope.may_query, Scope::Query),
        (scope.may_send_guests, Scope::Send),
    ];
    TrustedHost {
        name: host.name.clone(),
        fingerprint: host.id.to_string(),
        addresses: host.addresses.clone(),
        may: may
            .into_iter()
            .filter_map(|(may, scope)| may.then_some(scope))
            .collect(),
    }
}

fn api_error(error: &TrustError) -> ApiError {
    let make = |code| ApiError::new(code, error.to_string());
    match error {
        TrustError::IdentityChanged { name, was, now } => ApiError::new(
            ErrorCode::AlreadyExists,
            format!("{name} is trusted with another fingerprint: it is {was}, this is {now}"),
        )
        .hint(format!(
            "compare with what `longhaul host` shows on {name}; if it really has a new one, add \
             --replace"
        )),
        TrustError::OtherName { name, .. } => ApiError::new(
            ErrorCode::AlreadyExists,
            format!("that fingerprint is trusted already, under the name {name}"),
        )
        .hint(format!(
            "to call it something else: longhaul host forget {name}"
        )),
        TrustError::NoSuchHost(name) => unknown_host(name),
        TrustError::BadEntry(_) => make(ErrorCode::InvalidRequest),
        TrustError::File { .. } | TrustError::Malformed { .. } => {
            make(ErrorCode::Internal).hint("correct the file; until then this host trusts nobody")
        }
    }
}

/// Returns the error for an unknown host.
fn unknown_host(name: &str) -> ApiError {
    let name: String = name.chars().take(80).collect();
    ApiError::new(
        ErrorCode::HostUnknown,
        format!("no host called {name:?} is trusted here"),
    )
    .hint("`longhaul host list` shows the trusted hosts; `longhaul host trust` adds one")
}

/// Notes which limits hosts have now: they keep them, whatever they are called later.
fn remember_limits(manager: &Manager) -> Result<(), ApiError> {
    tokio::task::block_in_place(|| manager.remember_limits())
}

/// Refuses to lose a host while a guest needs it.
fn may_go(manager: &Manager, name: &str) -> Result<(), ApiError> {
    let Some(migration) = manager.that_need(name).into_iter().next() else {
        return Ok(());
    };
    let text = format!(
        "migration {} of {} still needs {name}: only {name} can say where that guest runs, or has \
         blocks of its disks",
        migration.id, migration.guest
    );
    let hint = format!(
        "wait for its end, or cancel it; if {name} never comes back: longhaul resolve {}",
        migration.guest
    );
    Err(ApiError::new(ErrorCode::GuestBusy, text).hint(hint))
}
