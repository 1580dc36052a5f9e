//! Serves the REST API: routes and limits.

use crate::agent::guests::Guests;
use crate::agent::hosts::Hosts;
use crate::agent::parcel_devices;
use crate::agent::realm::Realms;
use crate::agent::streams;
use axum::Router;
use axum::body::{Bytes, HttpBody};
use axum::extract::rejection::RawPathParamsRejection;
use axum::extract::{DefaultBodyLimit, FromRequest, RawPathParams, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodFilter, on};
use longhaul_api::{
    ApiError, ErrorCode, Limit, Method, Migrations, Operation, PlanRequest, Probe,
    REQUEST_BYTES_MAX, Replicas, ReplicateGuest, Replications, Resolve, StartMigration, StopGuest,
};
use longhaul_migration::Manager;
use longhaul_migration::host::config::BANDWIDTH_BPS;
use longhaul_protocol::MigrationId;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// The time limit for a request's body.
const BODY_WAIT: Duration = Duration::from_secs(20);
/// Seconds between two versions of a replica: a week at most.
const EVERY_S: RangeInclusive<u64> = 10..=604_800;
/// Versions of a replica that are kept.
const KEEP: RangeInclusive<u64> = 1..=1000;
const PROBE_SECONDS: RangeInclusive<u64> = 1..=60;
const DOWNTIME_MS: RangeInclusive<u64> = 1..=600_000;
const PATIENCE_MS: RangeInclusive<u64> = 100..=86_400_000;

/// The parameter in an operation's path, where it has one.
type Parameter = Result<RawPathParams, RawPathParamsRejection>;

/// The state of the handlers.
#[derive(Clone)]
pub(crate) struct Service {
    pub(crate) hosts: Arc<Hosts>,
    pub(crate) guests: Arc<Guests>,
    pub(crate) manager: Arc<Manager>,
    pub(crate) realms: Arc<Realms>,
}

/// Returns the API's router: each operation at its method and path, and errors in the API's own
/// form for everything else.
pub(crate) fn router(service: Service) -> Router {
    let mut router = Router::new();
    for operation in Operation::ALL {
        let filter = match operation.method() {
            Method::Get => MethodFilter::GET,
            Method::Post => MethodFilter::POST,
            Method::Put => MethodFilter::PUT,
            Method::Delete => MethodFilter::DELETE,
        };
        let handler = move |State(service): State<Service>, path: Parameter, request: Request| {
            handle(operation, service, path, request)
        };
        router = router.route(operation.path(), on(filter, handler));
    }
    router
        .fallback(|request: Request| async move {
            refuse(
                ErrorCode::RouteUnknown,
                format!("there is no {}", shorten(request.uri().path())),
            )
        })
        .method_not_allowed_fallback(|request: Request| async move {
            refuse(
                ErrorCode::MethodNotAllowed,
                format!(
                    "{} cannot be used with {}",
                    request.method(),
                    shorten(request.uri().path())
                ),
            )
        })
        .layer(DefaultBodyLimit::max(REQUEST_BYTES_MAX))
        .with_state(service)
}

fn shorten(text: &str) -> String {
    text.chars().take(200).collect()
}

fn refuse(code: ErrorCode, message: String) -> Response {
    let error = ApiError::new(code, message)
        .hint("GET /v1/openapi.json describes what this agent understands");
    error_response(&error)
}

/// Returns the response for an error.
pub(crate) fn error_response(error: &ApiError) -> Response {
    let status =
        StatusCode::from_u16(error.code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    json(status, error)
}

fn json(status: StatusCode, content: &impl Serialize) -> Response {
    match serde_json::to_vec(content) {
        Ok(bytes) => {
            let kind = (header::CONTENT_TYPE, "application/json");
            (status, [kind], bytes).into_response()
        }
        Err(error) => {
            tracing::error!(%error, "an answer could not be written as JSON");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

fn ok(content: &impl Serialize) -> Response {
    json(StatusCode::OK, content)
}

async fn handle(
    operation: Operation,
    service: Service,
    parameter: Parameter,
    request: Request,
) -> Response {
    let result = async {
        let value = match &parameter {
            Ok(path) => path.iter().next().map_or("", |(_, value)| value),
            Err(error) => {
                let what = format!("the path cannot be understood: {error}");
                return Err(ApiError::new(ErrorCode::InvalidRequest, what));
            }
        };
        if operation == Operation::UseParcelDevice {
            service.hosts.require(value).await?;
            return parcel_devices::use_device(&service.manager, value, request).await;
        }
        let body = body(request).await?;
        perform(operation, &service, value, &body).await
    }
    .await;
    result.unwrap_or_else(|error| {
        tracing::debug!(?operation, code = ?error.code, message = %error.message, "refused");
        error_response(&error)
    })
}

async fn body(request: Request) -> Result<Bytes, ApiError> {
    let too_large = || {
        let what = format!("the request is larger than {REQUEST_BYTES_MAX} bytes");
        ApiError::new(ErrorCode::RequestTooLarge, what)
    };
    // A body that is announced as too large need not be received.
    if request.body().size_hint().lower() > REQUEST_BYTES_MAX as u64 {
        return Err(too_large());
    }
    match timeout(BODY_WAIT, Bytes::from_request(request, &())).await {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(rejection)) if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE => {
            Err(too_large())
        }
        Ok(Err(rejection)) => Err(ApiError::new(
            ErrorCode::InvalidRequest,
            format!("the request could not be read: {rejection}"),
        )),
        Err(_) => Err(ApiError::new(
            ErrorCode::InvalidRequest,
            "the request's body did not arrive within 20 s",
        )),
    }
}

async fn perform(
    operation: Operation,
    service: &Service,
    value: &str,
    body: &Bytes,
) -> Result<Response, ApiError> {
    let Service {
        hosts,
        guests,
        manager,
        realms,
    } = service;
    Ok(match operation {
        Operation::GetHost => ok(&hosts.this(guests).await),
        Operation::ListHosts => ok(&hosts.list().await?),
        Operation::TrustHost => json(
            StatusCode::CREATED,
            &hosts.trust(manager, parse(body)?).await?,
        ),
        Operation::ForgetHost => {
            hosts.forget(manager, value).await?;
            StatusCode::NO_CONTENT.into_response()
        }
        Operation::ProbeHost => {
            let probe: Probe = parse_or_default(body)?;
            in_range("seconds", u64::from(probe.seconds), PROBE_SECONDS)?;
            check_bandwidth(probe.bandwidth_bps)?;
            hosts.require(value).await?;
            ok(&manager.probe(value, probe).await?)
        }
        Operation::GetRealm => ok(&realms.get().await),
        Operation::JoinRealm => json(StatusCode::CREATED, &realms.join(parse(body)?).await?),
        Operation::LeaveRealm => {
            realms.leave().await?;
            StatusCode::NO_CONTENT.into_response()
        }
        Operation::ListGuests => ok(&guests.list(manager).await?),
        Operation::GetGuest => ok(&guests.get(manager, value).await?),
        Operation::StartGuest => json(
            StatusCode::CREATED,
            &guests.start(manager, parse(body)?).await?,
        ),
        Operation::StopGuest => {
            let stop: StopGuest = parse_or_default(body)?;
            ok(&guests.stop(manager, value, stop).await?)
        }
        Operation::ResumeGuest => ok(&guests.resume(manager, value).await?),
        Operation::ReclaimGuest => ok(&guests.reclaim(manager, value, parse(body)?).await?),
        Operation::AttachGuest => json(
            StatusCode::CREATED,
            &guests.attach(manager, value, parse(body)?).await?,
        ),
        Operation::DetachGuest => {
            guests.detach(manager, value).await?;
            StatusCode::NO_CONTENT.into_response()
        }
        Operation::DiscoverGuests => ok(&guests.discover().await?),
        Operation::TrackWrites => {
            guests.require(value)?;
            json(StatusCode::CREATED, &manager.track_writes(value).await?)
        }
        Operation::GetTrackedWrites => {
            guests.require(value)?;
            ok(&manager.tracked_writes(value).await?)
        }
        Operation::StopTrackingWrites => {
            guests.require(value)?;
            manager.stop_tracking(value).await?;
            StatusCode::NO_CONTENT.into_response()
        }
        Operation::ReplicateGuest => {
            let how: ReplicateGuest = parse(body)?;
            in_range("every_s", how.every_s, EVERY_S)?;
            in_range("keep.last", u64::from(how.keep.last), KEEP)?;
            let more = [
                ("keep.hourly", how.keep.hourly),
                ("keep.daily", how.keep.daily),
                ("keep.weekly", how.keep.weekly),
            ];
            for (name, number) in more {
                in_range(name, u64::from(number), 0..=*KEEP.end())?;
            }
            guests.require(value)?;
            hosts.require(&how.to).await?;
            ok(&manager.replicate(value, how).await?)
        }
        Operation::ListReplications => ok(&Replications {
            replications: manager.replications(),
        }),
        Operation::StopReplication => {
            manager.stop_replication(value).await?;
            StatusCode::NO_CONTENT.into_response()
        }
        Operation::ListReplicas => ok(&Replicas {
            replicas: manager.replicas()?,
        }),
        Operation::RemoveReplica => {
            manager.remove_replica(value)?;
            StatusCode::NO_CONTENT.into_response()
        }
        Operation::FailOver => ok(&guests.fail_over(manager, value, parse(body)?).await?),
        // It needs the request's connection.
        Operation::UseParcelDevice => {
            let what = "this operation cannot be performed without its connection";
            return Err(ApiError::new(ErrorCode::Internal, what));
        }
        Operation::PlanMigration => {
            let plan: PlanRequest = parse(body)?;
            in_range("downtime_ms", plan.downtime_ms, DOWNTIME_MS)?;
            check_bandwidth(plan.bandwidth_bps)?;
            guests.require(&plan.guest)?;
            hosts.require(&plan.to).await?;
            ok(&manager.plan(plan).await?)
        }
        Operation::StartMigration => {
            let start: StartMigration = parse(body)?;
            in_range("downtime_ms", start.downtime_ms, DOWNTIME_MS)?;
            in_range("patience_ms", start.patience_ms, PATIENCE_MS)?;
            check_bandwidth(start.bandwidth_bps)?;
            guests.require(&start.guest)?;
            hosts.require(&start.to).await?;
            json(StatusCode::ACCEPTED, &manager.start(start).await?)
        }
        Operation::ListMigrations => ok(&Migrations {
            migrations: manager.list().await,
        }),
        Operation::GetMigration => ok(&manager.get(resolve(manager, value).await?).await?),
        Operation::WatchMigration => {
            let id = resolve(manager, value).await?;
            streams::watch(manager.watch(id).await?)
        }
        Operation::CancelMigration => {
            let id = resolve(manager, value).await?;
            json(StatusCode::ACCEPTED, &manager.cancel(id).await?)
        }
        Operation::ResolveMigration => {
            let resolution: Resolve = parse(body)?;
            let id = resolve(manager, value).await?;
            json(
                StatusCode::ACCEPTED,
                &manager.resolve(id, resolution).await?,
            )
        }
        Operation::LimitMigration => {
            let limit: Limit = parse(body)?;
            check_bandwidth(limit.bandwidth_bps)?;
            ok(&manager.limit(resolve(manager, value).await?, limit).await?)
        }
        Operation::ReportMigration => ok(&manager.report(resolve(manager, value).await?).await?),
        Operation::WatchEvents => streams::events(manager.events()?),
        Operation::GetOpenapi => ok(&longhaul_api::openapi()),
    })
}

fn in_range(what: &str, value: u64, range: RangeInclusive<u64>) -> Result<(), ApiError> {
    if range.contains(&value) {
        return Ok(());
    }
    let (from, to) = range.into_inner();
    Err(ApiError::new(
        ErrorCode::InvalidRequest,
        format!("`{what}` is {value}; it can be {from} to {to}"),
    ))
}

fn check_bandwidth(bandwidth_bps: Option<u64>) -> Result<(), ApiError> {
    bandwidth_bps.map_or(Ok(()), |bandwidth| {
        in_range("bandwidth_bps", bandwidth, BANDWIDTH_BPS)
    })
}

fn parse<T: DeserializeOwned>(body: &Bytes) -> Result<T, ApiError> {
    serde_json::from_slice(body).map_err(|error| {
        ApiError::new(
            ErrorCode::InvalidRequest,
            format!("the request is not what this operation takes: {error}"),
        )
        .hint("GET /v1/openapi.json describes what this agent understands")
    })
}

fn parse_or_default<T: DeserializeOwned + Default>(body: &Bytes) -> Result<T, ApiError> {
    if body.is_empty() {
        return Ok(T::default());
    }
    parse(body)
}

/// Returns the migration whose id begins with this text.
async fn resolve(manager: &Manager, prefix: &str) -> Result<MigrationId, ApiError> {
    if let Ok(id) = prefix.parse() {
        return Ok(id);
    }
    let ids = manager
        .list()
        .await
        .into_iter()
        .map(|migration| migration.id);
    let found = unique_prefix(prefix, ids)?;
    found.parse().map_err(|error| {
        ApiError::new(
            ErrorCode::Internal,
            format!("an id of our own is none: {error}"),
        )
    })
}

fn unique_prefix(prefix: &str, ids: impl Iterator<Item = String>) -> Result<String, ApiError> {
    let prefix = prefix.to_ascii_lowercase();
    let mut found: Vec<String> = ids.filter(|id| id.starts_with(&prefix)).collect();
    match (found.pop(), found.len()) {
        (Some(id), 0) if !prefix.is_empty() => Ok(id),
        (Some(_), others) => Err(ApiError::new(
            ErrorCode::MigrationAmbiguous,
            format!(
                "{} migrations have an id that begins with {prefix:?}",
                others + 1
            ),
        )
        .hint("give more of it: `longhaul migrations` lists them")),
        (None, _) => Err(ApiError::new(
            ErrorCode::MigrationUnknown,
            format!(
                "no migration has an id that begins with {:?}",
                shorten(&prefix)
            ),
        )
        .hint("`longhaul migrations` lists those of this host")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_migration_is_found_by_the_beginning_of_its_id() {
        let ids = || {
            ["7f3a01", "7f3b02", "a00001"]
                .map(str::to_owned)
                .into_iter()
        };
        assert_eq!(unique_prefix("A", ids()), Ok("a00001".to_owned()));
        assert_eq!(unique_prefix("7f3b", ids()), Ok("7f3b02".to_owned()));
        let code = |prefix| unique_prefix(prefix, ids()).unwrap_err().code;
        assert_eq!(code("7f"), ErrorCode::MigrationAmbiguous);
        assert_eq!(code(""), ErrorCode::MigrationAmbiguous);
        assert_eq!(code("b"), ErrorCode::MigrationUnknown);
    }

    #[test]
    fn figures_out_of_range_are_named() {
        let error = in_range("downtime_ms", 0, DOWNTIME_MS).unwrap_err();
        assert_eq!(error.message, "`downtime_ms` is 0; it can be 1 to 600000");
        assert!(check_bandwidth(None).is_ok());
        assert!(check_bandwidth(Some(5)).is_err());
    }
}
