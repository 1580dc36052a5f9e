//! Generates the OpenAPI 3.1 description of the API from [`Operation`] and the types themselves.

use crate::operation::Operation;
use crate::{
    ApiError, AttachGuest, DiscoveredGuests, ErrorCode, Event, FailOver, FailedOver, Guest, Guests,
    Host, JoinRealm, Limit, Migration, Migrations, Plan, PlanRequest, Probe, ProbeResult, Progress,
    RealmStatus, ReclaimGuest, Replicas, ReplicateGuest, Replication, Replications, Report,
    Resolve, StartGuest, StartMigration, StopGuest, TrackedWrites, Trust, TrustedHost,
    TrustedHosts,
};
use schemars::generate::{SchemaGenerator, SchemaSettings};
use schemars::{JsonSchema, Schema};
use serde_json::{Map, Value, json};

type SchemaOf = fn(&mut SchemaGenerator) -> Schema;

/// The request and answer of an operation, besides its method and path.
struct Description {
    id: &'static str,
    summary: &'static str,
    request: Option<SchemaOf>,
    /// Whether the request's body is optional.
    request_optional: bool,
    status: u16,
    media_type: &'static str,
    answer: Option<SchemaOf>,
    answer_description: &'static str,
}

impl Description {
    fn new(id: &'static str, summary: &'static str) -> Self {
        Self {
            id,
            summary,
            request: None,
            request_optional: false,
            status: 200,
            media_type: "application/json",
            answer: None,
            answer_description: "Done.",
        }
    }

    fn takes<T: JsonSchema>(mut self) -> Self {
        self.request = Some(|generator| generator.subschema_for::<T>());
        self
    }

    fn may_take<T: JsonSchema>(self) -> Self {
        let mut description = self.takes::<T>();
        description.request_optional = true;
        description
    }

    fn gives<T: JsonSchema>(mut self, what: &'static str) -> Self {
        self.answer = Some(|generator| generator.subschema_for::<T>());
        self.answer_description = what;
        self
    }

    fn status(mut self, status: u16) -> Self {
        self.status = status;
        self
    }
}

fn describe(operation: Operation) -> Description {
    let new = Description::new;
    match operation {
        Operation::GetHost => new("getHost", "What this host is").gives::<Host>("This host."),
        Operation::ListHosts => new("listHosts", "The hosts that this one trusts")
            .gives::<TrustedHosts>("The trusted hosts, by name."),
        Operation::TrustHost => new("trustHost", "Trust a host from now on")
            .takes::<Trust>()
            .gives::<TrustedHost>("It is trusted.")
            .status(201),
        Operation::ForgetHost => new("forgetHost", "Trust a host no longer").status(204),
        Operation::ProbeHost => new("probeHost", "Measure the link to a trusted host")
            .may_take::<Probe>()
            .gives::<ProbeResult>("What was measured."),
        Operation::GetRealm => {
            new("getRealm", "The realm of this host").gives::<RealmStatus>("The realm, or null.")
        }
        Operation::JoinRealm => new("joinRealm", "Join a realm with a one-time token")
            .takes::<JoinRealm>()
            .gives::<RealmStatus>("This host is a member, and registered at a server.")
            .status(201),
        Operation::LeaveRealm => new(
            "leaveRealm",
            "Forget the realm; its operator removes this host from the ruleset",
        )
        .status(204),
        Operation::ListGuests => {
            new("listGuests", "The guests of this host").gives::<Guests>("The guests, by name.")
        }
        Operation::GetGuest => new("getGuest", "One guest").gives::<Guest>("The guest."),
        Operation::StartGuest => new("startGuest", "Start a guest")
            .takes::<StartGuest>()
            .gives::<Guest>("It runs.")
            .status(201),
        Operation::StopGuest => new("stopGuest", "Stop a guest")
            .may_take::<StopGuest>()
            .gives::<Guest>("It is stopped."),
        Operation::ResumeGuest => new("resumeGuest", "Resume a guest that a move has left paused")
            .gives::<Guest>("It runs."),
        Operation::ReclaimGuest => new(
            "reclaimGuest",
            "Take back the right to run a guest from a host that never comes back",
        )
        .takes::<ReclaimGuest>()
        .gives::<Guest>("It belongs to this host, and is not started."),
        Operation::AttachGuest => new(
            "attachGuest",
            "Attach to a guest that something else started",
        )
        .takes::<AttachGuest>()
        .gives::<Guest>("It is known here; nothing of it was changed.")
        .status(201),
        Operation::DetachGuest => new(
            "detachGuest",
            "Forget a guest that was attached to; it goes on as it is",
        )
        .status(204),
        Operation::DiscoverGuests => new(
            "discoverGuests",
            "The QEMU processes of this host, and whether they could be attached to",
        )
        .gives::<DiscoveredGuests>("The processes, by their numbers; nothing was changed."),
        Operation::TrackWrites => new(
            "trackWrites",
            "Begin to track a guest's writes to its local disks",
        )
        .gives::<TrackedWrites>("They are tracked.")
        .status(201),
        Operation::GetTrackedWrites => {
            new("getTrackedWrites", "The tracked writes of a guest")
                .gives::<TrackedWrites>("What may have changed; without disks if none are tracked.")
        }
        Operation::StopTrackingWrites => new(
            "stopTrackingWrites",
            "End the tracking of a guest's writes, and forget them",
        )
        .status(204),
        Operation::ReplicateGuest => new(
            "replicateGuest",
            "Begin to replicate a guest to another host, or change how",
        )
        .takes::<ReplicateGuest>()
        .gives::<Replication>("The other host takes it; the first version is under way."),
        Operation::ListReplications => {
            new("listReplications", "The replications of this host's guests")
                .gives::<Replications>("The replications, by the names of their guests.")
        }
        Operation::StopReplication => new(
            "stopReplication",
            "End the replication of a guest; the other host keeps what it has",
        )
        .status(204),
        Operation::ListReplicas => new("listReplicas", "The replicas that this host keeps")
            .gives::<Replicas>("The replicas, by the names of their guests."),
        Operation::RemoveReplica => {
            new("removeReplica", "Remove a replica with all its versions").status(204)
        }
        Operation::FailOver => new("failOver", "Let a guest run here from its replica")
            .takes::<FailOver>()
            .gives::<FailedOver>("It belongs to this host, and its disks are in place."),
        Operation::UseParcelDevice => {
            let mut device = new(
                "useParcelDevice",
                "Open a channel to a device of a parcel that is attached to another host",
            )
            .status(101);
            device.answer_description = "The connection carries the channel's messages from now \
                on (`Upgrade: longhaul-parcel-device`), each after its length in 4 bytes, \
                little-endian; docs/wire.md describes them.";
            device
        }
        Operation::PlanMigration => new(
            "planMigration",
            "Check and predict a migration, changing nothing",
        )
        .takes::<PlanRequest>()
        .gives::<Plan>("The checks and the predictions; a refusing check is no error."),
        Operation::StartMigration => new("startMigration", "Start a migration")
            .takes::<StartMigration>()
            .gives::<Migration>("It is under way.")
            .status(202),
        Operation::ListMigrations => new("listMigrations", "The migrations of this host")
            .gives::<Migrations>("The migrations, the newest first."),
        Operation::GetMigration => {
            new("getMigration", "One migration").gives::<Migration>("The migration.")
        }
        Operation::WatchMigration => {
            let mut watch = new("watchMigration", "Watch a migration").gives::<Progress>(
                "One JSON document a line: at once, at every change but at most ten times a \
                 second, and once a second when nothing changes. The last has an outcome.",
            );
            watch.media_type = "application/x-ndjson";
            watch
        }
        Operation::CancelMigration => new(
            "cancelMigration",
            "Stop a migration and keep the guest at the source",
        )
        .gives::<Migration>("It stops; watch it for its outcome.")
        .status(202),
        Operation::ResolveMigration => new(
            "resolveMigration",
            "Say which side runs the guest of a migration whose `doubt` is not null",
        )
        .takes::<Resolve>()
        .gives::<Migration>("It is being done; the migration has another outcome when it is.")
        .status(202),
        Operation::LimitMigration => new("limitMigration", "Change a migration's limit")
            .takes::<Limit>()
            .gives::<Migration>("The limit holds."),
        Operation::ReportMigration => {
            new("reportMigration", "What was predicted, and what was")
                .gives::<Report>("The report; of a migration under way, so far.")
        }
        Operation::WatchEvents => {
            let mut watch = new(
                "watchEvents",
                "Watch the migrations and reserved guests of this host",
            )
            .gives::<Event>(
                "One JSON document a line: the present state at once, then every change, and once \
                 a second that there was none. A client that reads too slowly gets the present \
                 state again. It ends with the agent.",
            );
            watch.media_type = "application/x-ndjson";
            watch
        }
        Operation::GetOpenapi => {
            let mut openapi = new("getOpenapi", "This document");
            openapi.answer = Some(|_| json_schema_object());
            openapi.answer_description = "An OpenAPI 3.1 document.";
            openapi
        }
    }
}

fn json_schema_object() -> Schema {
    schemars::json_schema!({ "type": "object" })
}

/// Returns the document.
pub fn openapi() -> Value {
    let settings = || {
        SchemaSettings::draft2020_12().with(|settings| {
            settings.definitions_path = "/components/schemas".into();
            settings.meta_schema = None;
        })
    };
    let mut requests = settings().for_deserialize().into_generator();
    let mut answers = settings().for_serialize().into_generator();
    let error = answers.subschema_for::<ApiError>();
    let mut paths = Map::new();
    for operation in Operation::ALL {
        let entry = paths
            .entry(operation.path())
            .or_insert_with(|| Value::Object(Map::new()));
        let method = operation.method().as_str().to_ascii_lowercase();
        entry[method] = operation_object(operation, &mut requests, &mut answers);
    }
    let mut schemas = answers.take_definitions(true);
    schemas.extend(requests.take_definitions(true));
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Longhaul agent",
            "version": "1",
            "description": "Moves running virtual machines between hosts. Served on a unix \
                socket, and over TCP with TLS and a bearer token where that is configured. A \
                figure that was not measured is null; units stand last in names.",
            "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" },
        },
        "servers": [{ "url": "/", "description": "An agent" }],
        "security": [{}, { "token": [] }],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": { "Error": {
                "description": error_description(),
                "content": { "application/json": { "schema": error } },
            } },
            "securitySchemes": { "token": { "type": "http", "scheme": "bearer" } },
        },
    })
}

fn operation_object(
    operation: Operation,
    requests: &mut SchemaGenerator,
    answers: &mut SchemaGenerator,
) -> Value {
    let description = describe(operation);
    let mut answer = json!({ "description": description.answer_description });
    if let Some(schema) = description.answer {
        answer["content"] = json!({ description.media_type: { "schema": schema(answers) } });
    }
    let mut object = json!({
        "operationId": description.id,
        "summary": description.summary,
        "responses": {
            description.status.to_string(): answer,
            "default": { "$ref": "#/components/responses/Error" },
        },
    });
    if let Some(name) = operation.parameter() {
        let description = match name {
            "migration" => "Its id, or the beginning of it that no other has.",
            _ => "Its name.",
        };
        object["parameters"] = json!([{
            "name": name,
            "in": "path",
            "required": true,
            "description": description,
            "schema": { "type": "string" },
        }]);
    }
    if let Some(schema) = description.request {
        object["requestBody"] = json!({
            "required": !description.request_optional,
            "content": { "application/json": { "schema": schema(requests) } },
        });
    }
    object
}

fn error_description() -> String {
    let mut codes: Vec<(u16, String)> = Vec::new();
    for code in ErrorCode::ALL {
        let name = serde_json::to_value(code)
            .ok()
            .and_then(|value| value.as_str().map(str::to_owned))
            .unwrap_or_default();
        codes.push((code.http_status(), name));
    }
    codes.sort();
    let mut text = String::from("What is wrong and what to do. Statuses:");
    let mut last = 0;
    for (status, name) in codes {
        if status == last {
            text.push_str(&format!(", {name}"));
        } else {
            text.push_str(&format!("\n- {status}: {name}"));
        }
        last = status;
    }
    text
}

/// Returns the document's text, as it is committed.
pub fn openapi_text() -> String {
    format!("{:#}\n", openapi())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_document_agrees_with_the_code() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/openapi.json");
        if std::env::var_os("LONGHAUL_BLESS").is_some() {
            std::fs::write(path, openapi_text()).unwrap();
        }
        let committed = std::fs::read_to_string(path).unwrap();
        let committed: Value = serde_json::from_str(&committed).unwrap();
        assert!(
            committed == openapi(),
            "crates/api/openapi.json is out of date: \
             LONGHAUL_BLESS=1 cargo test -p longhaul-api writes it again"
        );
    }

    #[test]
    fn every_reference_leads_somewhere() {
        fn visit(value: &Value, document: &Value) {
            match value {
                Value::Object(map) => {
                    if let Some(reference) = map.get("$ref").and_then(Value::as_str) {
                        let pointer = reference.strip_prefix('#').unwrap();
                        assert!(document.pointer(pointer).is_some(), "{reference}");
                    }
                    map.values().for_each(|value| visit(value, document));
                }
                Value::Array(list) => list.iter().for_each(|value| visit(value, document)),
                _ => {}
            }
        }
        let document = openapi();
        visit(&document, &document);
        assert!(document["components"]["schemas"]["Progress"].is_object());
    }

    /// Requests and answers are described separately (a field with a default is optional in a
    /// request and always present in an answer), so no type may be used for both.
    #[test]
    fn no_type_is_described_in_two_ways() {
        let settings = SchemaSettings::draft2020_12;
        let mut requests = settings().for_deserialize().into_generator();
        let mut answers = settings().for_serialize().into_generator();
        for operation in Operation::ALL {
            let description = describe(operation);
            if let Some(schema) = description.request {
                schema(&mut requests);
            }
            if let Some(schema) = description.answer {
                schema(&mut answers);
            }
        }
        let answers = answers.take_definitions(true);
        for (name, schema) in requests.take_definitions(true) {
            if let Some(other) = answers.get(&name) {
                assert_eq!(other, &schema, "{name}");
            }
        }
    }
}
